"""Writing the record of a run so that no kill can spoil it: one line per reading, and Parquet beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rankscope._errors import InputError
from rankscope.runs._frozen import thaw
from rankscope.runs.gauge_record import SCHEMA, SEGMENT, read_segment, table_of
from rankscope.runs.provenance import installed_versions
from rankscope.runs.readings import Reading

SEGMENT_BYTES = 32 * 2**20


class RecordWriter:
    """Appends to ``readings-NNNNN.jsonl``; a full segment, and the last when closed, also becomes Parquet.

    A line goes to the operating system before :meth:`write` returns, so that a killed process loses at most the line it
    was writing. A record that is already in the folder is continued, behind whatever its last line is.

    Args:
        folder: made if it is not there.
        facts: what the gauge says about itself, written at the start of every session and segment.
        segment_bytes: size from which on a new segment is begun.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any], *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._facts = {"rankscope_gauge": SCHEMA, "versions": installed_versions(), **thaw(facts)}
        self._segment_bytes = segment_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"record={str(folder)!r} cannot be made a folder ({error.strerror}).") from error
        numbers = [int(match[1]) for path in folder.iterdir() if (match := SEGMENT.fullmatch(path.name))]
        try:
            self._begin(max(numbers, default=0))
        except OSError as error:
            raise InputError(f"record={str(folder)!r} cannot be written to ({error.strerror}).") from error

    def write(self, reading: Reading) -> None:
        """Append one reading."""
        if self._append(reading.to_json()) > self._segment_bytes:
            self._to_parquet()
            self._begin(self._number + 1)

    def close(self) -> None:
        """Write the Parquet twin of the last segment; may be called again."""
        self._to_parquet()

    def _begin(self, number: int) -> None:
        self._number = number
        self._append(self._facts)

    def _append(self, entry: Mapping[str, Any]) -> int:
        """Add a line and give the size of the file; it is open only as long as that takes."""
        line = json.dumps(entry, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self._path(self._number).open("a+b") as stream:
            if stream.seek(0, os.SEEK_END) > 0:
                stream.seek(-1, os.SEEK_END)
                line = line if stream.read(1) == b"\n" else b"\n" + line
            stream.write(line)
            return stream.tell()

    def _to_parquet(self) -> None:
        path = self._path(self._number)
        temporary = path.with_suffix(".parquet.part")
        pq.write_table(table_of(read_segment(path)), temporary, compression="zstd")
        temporary.replace(path.with_suffix(".parquet"))

    def _path(self, number: int) -> Path:
        return self._folder / f"readings-{number:05d}.jsonl"
