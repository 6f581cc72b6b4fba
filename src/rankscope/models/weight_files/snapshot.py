"""A model of the hub as a local folder: downloaded by huggingface_hub into its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from rankscope.errors import LoadError
from rankscope.models.loading.foreign import in_a_line, refusing
from rankscope.models.loading.shard_files import (
    INDEX,
    TOKENIZER_EXTRAS,
    TOKENIZER_FILES,
    named_in_index,
    refuse_large,
)
from rankscope.models.weight_files.remote import CONNECTIONS, hub_listing, readable_errors

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def hub_snapshot(name: str, revision: str | None, *, weights: bool, allow_pickle: bool = False) -> Path:
    """The folder of a model of the hub, after downloading what it lacks; without a network, what the cache has.

    Args:
        name: its id.
        revision: branch, tag or commit; None for the default branch.
        weights: also the weights; otherwise configuration and tokenizer only.
        allow_pickle: also ``pytorch_model.bin`` if there are no safetensors.

    Raises:
        LoadError: neither the hub nor the cache has it, or it cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.utils import HfHubHTTPError  # type: ignore[attr-defined]

    where = f"hub:{name}"
    try:
        _, sizes = hub_listing(name, revision)
    except HfHubHTTPError as error:
        with readable_errors(where):
            raise error
    except LoadError:
        raise
    except Exception as error:  # noqa: BLE001  (no answer, for which each version of the client has its own errors)
        missing = f"the hub gives no list of its files ({in_a_line(error)[:150]}), and the cache has no {name}"
        with refusing(LoadError, missing, ""):
            return Path(snapshot_download(name, revision=revision, local_files_only=True))
    small = [
        one
        for one in ("config.json", *TOKENIZER_FILES, *TOKENIZER_EXTRAS, *([INDEX] if weights else []))
        if one in sizes
    ]
    if not small:
        raise LoadError(f"{name} has no config.json, so it is not a model.")
    for one in small:
        refuse_large(one, sizes[one], f"{where}/{one}")
    with readable_errors(where):
        # The first file is fetched by the name of the branch, which the cache then knows without a network as well.
        folder = Path(hf_hub_download(name, small[0], revision=revision)).parent
        fetched = partial(hf_hub_download, name, revision=folder.name)
        with ThreadPoolExecutor(CONNECTIONS) as readers:
            list(readers.map(fetched, small[1:]))
            if weights:
                list(readers.map(fetched, _weight_names(folder, list(sizes), allow_pickle)))
    return folder


def _weight_names(folder: Path, names: Sequence[str], allow_pickle: bool) -> list[str]:
    """The safetensors that the index names, or the only one; pickles if there are none and they are allowed."""
    if (folder / INDEX).is_file():
        return named_in_index((folder / INDEX).read_bytes(), f"{folder.name}/{INDEX}")
    if "model.safetensors" in names or not allow_pickle:
        return ["model.safetensors"] if "model.safetensors" in names else []
    return [name for name in names if name in PICKLES or (name.startswith("pytorch_model-") and name.endswith(".bin"))]
