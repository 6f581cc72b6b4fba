"""The folder for checkpoints, from which a killed run resumes after its last finished block."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from rankscope.errors import InputError, ResultError
from rankscope.models.inputs import Prepared
from rankscope.models.weight_files.files import WeightFile
from rankscope.runs.provenance import installed_versions


class Progress(Protocol):
    """The results of a verb so far."""

    def added(self) -> bytes:
        """The results of the stage that just ended."""

    def restore(self, added: bytes) -> None:
        """Load the results of a stage from an earlier process."""


class WorkFolder:
    """One record per finished block, written atomically.

    Args:
        place: the folder; None for a run that cannot resume.
    """

    def __init__(self, place: Path | None) -> None:
        self.place = place

    def restore(self, progress: Progress) -> int:
        """Load the finished stages; returns their number."""
        number = 0
        while self.place is not None and self._record(number).is_file():
            try:
                progress.restore(self._record(number).read_bytes())
            except (ResultError, ValueError, KeyError, TypeError) as error:
                raise ResultError(
                    f"{self._record(number)} is not a checkpoint of rankscope: {error}. Remove {self.place}."
                ) from error
            number += 1
        return number

    def finish(self, number: int, progress: Progress) -> None:
        """Record that stage ``number`` is done; its states must already be written."""
        if self.place is None:
            return
        path = self._record(number)
        partial = path.with_suffix(".partial")
        # Written under another name, flushed to disk and renamed: a record that exists is complete.
        with partial.open("wb") as file:
            file.write(progress.added())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)

    def _record(self, number: int) -> Path:
        assert self.place is not None
        return self.place / f"block-{number:05d}.arrow"


@contextmanager
def work_folder(work: str | Path | None, key: str, *, spills: bool) -> Iterator[tuple[WorkFolder, Path | None]]:
    """The work folder and the folder for states; both are removed when the run is complete.

    A run that fails or is killed leaves ``work/KEY``, and the same call resumes from it.
    """
    if work is None:
        if not spills:
            yield WorkFolder(None), None
            return
        with tempfile.TemporaryDirectory(prefix="rankscope-stream-") as passing:
            yield WorkFolder(None), Path(passing)
        return
    place = Path(work).expanduser() / key
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"work={str(work)!r} cannot be written: {error.strerror or error}.") from error
    yield WorkFolder(place), place
    # Not in a finally: after an error or an interrupt the folder must stay.
    shutil.rmtree(place)
    if not any(place.parent.iterdir()):
        place.parent.rmdir()


def content_key(files: Sequence[WeightFile], prepared: Prepared, options: Mapping[str, Any]) -> str:
    """A hash of what determines the values of a run: identity of files, inputs, options and library versions."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.identity};".encode())
    digest.update(json.dumps(dict(options), sort_keys=True, default=str).encode())
    digest.update(json.dumps(installed_versions(), sort_keys=True).encode())
    for part in prepared:
        for name, value in (*part.inputs.items(), *enumerate(part.arguments), ("keep", part.keep)):
            digest.update(str(name).encode())
            if isinstance(value, torch.Tensor):
                digest.update(str((value.shape, value.dtype)).encode())
                digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            else:
                digest.update(str(value).encode())
    return digest.hexdigest()[:16]
