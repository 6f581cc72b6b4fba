"""The folder for checkpoints, from which a killed run resumes after its last finished block."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from rankscope._files import read_regular
from rankscope.errors import InputError, ResultError
from rankscope.models.inputs import Prepared
from rankscope.models.weight_files.files import WeightFile
from rankscope.runs.places import replace_file, settle
from rankscope.runs.provenance import installed_versions

LARGEST_RECORD = 4 * 2**30


class Progress(Protocol):
    """The results of a verb so far."""

    def added(self) -> bytes:
        """The results of the stage that just ended."""

    def restore(self, added: bytes) -> None:
        """Load the results of a stage from an earlier process."""


class WorkFolder:
    """One record per finished block, written atomically: its hash, a line of JSON, then the verb's results.

    Args:
        place: the folder; None for a run that cannot resume.
    """

    def __init__(self, place: Path | None) -> None:
        self.place = place

    def restore(self, progress: Progress) -> tuple[int, Mapping[str, str]]:
        """Load the finished stages; returns their number, and the hashes of the states after the last one.

        Raises:
            ResultError: a record was changed after it was written, or was not written by rankscope.
        """
        number = 0
        states: Mapping[str, str] = {}
        while self.place is not None and self._record(number).exists():
            try:
                added, states = self._read(self._record(number))
                progress.restore(added)
            except (ResultError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ResultError(
                    f"{self._record(number)} is not a checkpoint that can be used: {error}. Remove {self.place} and "
                    "start the run again."
                ) from error
            number += 1
        return number, states

    def finish(self, number: int, progress: Progress, states: Mapping[str, str]) -> None:
        """Record that stage ``number`` is done; its states must already be on disk.

        Args:
            number: of the stage.
            progress: its results are part of the record.
            states: SHA-256 of each file of states, by name.
        """
        if self.place is None:
            return
        content = json.dumps({"stage": number, "states": dict(states)}).encode() + b"\n" + progress.added()
        try:
            replace_file(self._record(number), hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
            settle(self.place)
        except OSError as error:
            raise ResultError(
                f"{self._record(number)} could not be written ({error.strerror}). Free some space and start the run "
                "again; it resumes after the last finished block."
            ) from error

    @staticmethod
    def _read(path: Path) -> tuple[bytes, Mapping[str, str]]:
        digest, _, content = read_regular(path, LARGEST_RECORD).partition(b"\n")
        if digest != hashlib.sha256(content).hexdigest().encode():
            raise ValueError("its hash differs: it was changed after it was written")
        head, _, added = content.partition(b"\n")
        return added, json.loads(head)["states"]

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
