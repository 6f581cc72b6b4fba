"""Pretrained models small enough for examples and tests, which ``scripts/fetch_pretrained.py`` downloads once."""

from __future__ import annotations

from pathlib import Path

from rankscope._files import cache_folder
from rankscope.errors import LoadError

FETCH_COMMAND = "python scripts/fetch_pretrained.py"


def pretrained_folder(name: str) -> Path:
    """The folder of a downloaded model, ready for ``load``.

    Raises:
        LoadError: it was not downloaded; the message has the command that does it.
    """
    folder = cache_folder() / name
    if not (folder / "model.safetensors").is_file():
        raise LoadError(
            f"The pretrained model {name!r} is not in {cache_folder()}. Fetch it with: {FETCH_COMMAND} {name}"
        )
    return folder
