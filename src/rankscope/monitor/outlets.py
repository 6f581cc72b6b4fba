"""Where readings go: the record and the sinks. One that fails is dropped, the others continue."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pyarrow.parquet as pq

from rankscope.errors import InputError
from rankscope.monitor.acting import LOGGER
from rankscope.monitor.readings import Alarm, Reading
from rankscope.monitor.record import SCHEMA, SEGMENT, read_segment, table_of
from rankscope.runs._frozen import thaw
from rankscope.runs.locks import sole_writer
from rankscope.runs.plain_json import sealed_json
from rankscope.runs.provenance import installed_versions


@runtime_checkable
class Sink(Protocol):
    """A destination for numbers: a dashboard, a tracker, a file. Called on rank 0 only.

    A sink that raises is dropped, with one message that names the cause; the gauge continues.
    """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A few finite numbers by name, once per reading."""
        ...

    def alarm(self, step: int, alarm: Alarm) -> None:
        """An alarm that was raised or cleared."""
        ...

    def close(self) -> None:
        """Called once, after the last reading."""
        ...


SEGMENT_BYTES = 32 * 2**20


class RecordWriter:
    """Appends to ``readings-NNNNN.jsonl``; a full segment, and the last when closed, also becomes Parquet.

    A line is passed to the operating system before :meth:`write` returns, so a killed process loses at most the line it
    was writing. An existing record in the folder is continued after its last line.

    Args:
        folder: created if it does not exist.
        facts: description of the gauge, written at the start of every session and segment.
        segment_bytes: size at which a new segment is started.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any], *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._facts = {"rankscope_gauge": SCHEMA, "versions": installed_versions(), **thaw(facts)}
        self._segment_bytes = segment_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"record={str(folder)!r} cannot be made a folder ({error.strerror}).") from error
        release = sole_writer(folder)
        if release is None:
            raise InputError(
                f"record={str(folder)!r}: another gauge is writing into this folder; close it, or use another one."
            )
        self._release = weakref.finalize(self, release)
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
        """Write the last segment as Parquet and let others write into the folder; may be called again."""
        self._to_parquet()
        self._release()

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Add to the description of the gauge; the last one in a record counts."""
        self._facts |= thaw(facts)
        self._append(self._facts)

    def _begin(self, number: int) -> None:
        self._number = number
        self._append(self._facts)

    def _append(self, entry: Mapping[str, Any]) -> int:
        """Append a line and return the size of the file, which is open only meanwhile."""
        line = sealed_json(entry) + b"\n"
        with self._path(self._number).open("a+b") as stream:
            if stream.seek(0, os.SEEK_END) > 0:
                stream.seek(-1, os.SEEK_END)
                line = line if stream.read(1) == b"\n" else b"\n" + line
            stream.write(line)
            return stream.tell()

    def _to_parquet(self) -> None:
        path = self._path(self._number)
        temporary = path.with_suffix(".parquet.part")
        pq.write_table(table_of(read_segment(path)), temporary, compression="zstd", write_page_checksum=True)
        temporary.replace(path.with_suffix(".parquet"))

    def _path(self, number: int) -> Path:
        return self._folder / f"readings-{number:05d}.jsonl"


class Outlets:
    """Writes every reading to the record and to each sink.

    Args:
        sinks: in order.
        record: a folder, or None.
        facts: description of the gauge for the record.
        strict: raise when one fails.

    Attributes:
        count: number of readings of this session.
    """

    def __init__(
        self, sinks: Sequence[Sink], record: str | Path | None, facts: Mapping[str, Any], *, strict: bool
    ) -> None:
        for sink in sinks:
            if not isinstance(sink, Sink):
                raise InputError(f"{sink!r} is not a sink: it needs the methods scalars, alarm and close.")
        self._sinks = list(sinks)
        self._writer = None if record is None else RecordWriter(Path(record), facts)
        self.count = 0
        self._strict = strict
        self._closed = False

    def write(self, reading: Reading) -> None:
        """Record first, then the sinks."""
        if self._writer is not None:
            writer = self._writer
            if not self._tried("The record", lambda: writer.write(reading)):
                self._writer = None
        self.count += 1
        self._each(partial(_tell, reading))

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Add to the description of the gauge in the record, unless there is nothing to add or it is closed."""
        if self._writer is not None and facts and not self._closed:
            writer = self._writer
            if not self._tried("The record", lambda: writer.describe(facts)):
                self._writer = None

    def close(self) -> None:
        """Close everything; only once."""
        if self._closed:
            return
        self._closed = True
        if self._writer is not None:
            self._tried("The record", self._writer.close)
        self._each(lambda sink: sink.close())

    def _each(self, act: Callable[[Sink], None]) -> None:
        self._sinks = [sink for sink in self._sinks if self._tried(type(sink).__name__, partial(act, sink))]

    def _tried(self, name: str, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception:
            if self._strict:
                raise
            LOGGER.exception("%s failed and gets no more readings of the gauge; the run continues.", name)
            return False
        return True


def _tell(reading: Reading, sink: Sink) -> None:
    sink.scalars(reading.step, reading.scalars)
    for alarm in reading.alarms:
        sink.alarm(reading.step, alarm)
