"""Reads the record of a gauge: JSON lines, of which the last may be truncated. Does not import torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankscope._files import open_regular
from rankscope.errors import ResultError
from rankscope.monitor.readings import Alarm, LayerValue, Reading, one_line
from rankscope.runs._frozen import freeze
from rankscope.runs.plain_json import TruncatedError, parse_sealed

SCHEMA = 1
SEGMENT = re.compile(r"readings-(\d{5})\.jsonl")
LONGEST_LINE = 64 * 2**20


@dataclass(frozen=True, repr=False)
class Record:
    """All readings of a run, in order of their steps.

    Attributes:
        facts: the header the gauge wrote when it last started: model, versions, metrics, alarms, schedule.
        readings: one per step; if training was resumed from an earlier step, the later reading of a step is used.
        torn: number of truncated lines (the process was killed while writing), which are skipped.
        name: name of the folder it was read from.
    """

    facts: Mapping[str, Any]
    readings: tuple[Reading, ...]
    torn: int
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", freeze(self.facts))

    def __repr__(self) -> str:
        if not self.readings:
            return "Record: nothing was read yet"
        raised = sum(alarm.state == "raised" for alarm in self.alarms)
        alarms = f", {raised} alarm{'s' if raised > 1 else ''} raised" if raised else ""
        last = one_line(self.readings[-1], len(self.readings), self.alarms, self.notes)
        return f"Record{f' {self.name}' if self.name else ''}: {len(self.readings)} readings{alarms}; {last}"

    def _repr_html_(self) -> str:
        from rankscope.monitor.history import History
        from rankscope.monitor.showing import history_html

        history = History()
        for reading in self.readings:
            history.take(reading)
        return history_html(repr(self), history)

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Every alarm raised or cleared, in order."""
        return tuple(alarm for reading in self.readings for alarm in reading.alarms)

    @property
    def notes(self) -> tuple[Alarm, ...]:
        """Everything that was written down and is no alarm, in order."""
        return tuple(note for reading in self.readings for note in reading.notes)

    def table(self) -> pa.Table:
        """One row per step, metric, site and layer."""
        return table_of(self.readings)


def read_record(folder: str | os.PathLike[str]) -> Record:
    """Read the record a gauge wrote into ``folder``; training may still be running. The files are not trusted.

    Raises:
        ResultError: the folder holds no record, or a complete line was not written by a gauge or changed afterwards.
    """
    home = Path(folder)
    segments = _segments(home)
    if not segments:
        raise ResultError(f"There is no record of a gauge in {home}. Give the folder passed as Gauge(record=...).")
    facts: Mapping[str, Any] = {}
    readings: dict[int, Reading] = {}
    torn = 0
    for path in segments:
        for entry in _entries(path):
            if entry is None:
                torn += 1
            elif "rankscope_gauge" in entry:
                facts = _checked_facts(entry, path)
            else:
                # A run resumed from a checkpoint repeats steps; the last one written wins.
                reading = Reading.from_json(entry)
                readings[reading.step] = reading
    return Record(facts, tuple(readings[step] for step in sorted(readings)), torn, home.resolve().name)


def holds_record(folder: str | os.PathLike[str]) -> bool:
    """Whether a gauge wrote into this folder."""
    return bool(_segments(Path(folder)))


def read_segment(path: Path) -> tuple[Reading, ...]:
    """The readings of one file, in the order in which they were written."""
    return tuple(
        Reading.from_json(entry) for entry in _entries(path) if entry is not None and "rankscope_gauge" not in entry
    )


def table_of(readings: tuple[Reading, ...]) -> pa.Table:
    """The layer values of readings as one table."""
    rows = [(reading.step, reading.time, value) for reading in readings for value in reading.table]
    columns: dict[str, Any] = {
        "step": pa.array([step for step, _, _ in rows], pa.int64()),
        "time": pa.array([time for _, time, _ in rows], pa.float64()),
    }
    kinds = {"layer": pa.int32(), "mean": pa.float64(), "least": pa.float64(), "most": pa.float64()}
    for name in LayerValue.__dataclass_fields__:
        columns[name] = pa.array([getattr(value, name) for _, _, value in rows], kinds.get(name, pa.string()))
    return pa.table(columns)


def _segments(home: Path) -> list[Path]:
    return sorted(path for path in home.glob("readings-*.jsonl") if SEGMENT.fullmatch(path.name))


def _entries(path: Path) -> Iterator[dict[str, Any] | None]:
    """The parsed lines of a segment; None for a truncated one."""
    try:
        with open_regular(path) as lines:
            number = 0
            while line := lines.readline(LONGEST_LINE):
                number += 1
                if line != b"\n":
                    yield _entry(line, path, number)
    except OSError as error:
        raise ResultError(f"{path} cannot be read ({error.strerror}).") from error


def _entry(line: bytes, path: Path, number: int) -> dict[str, Any] | None:
    if len(line) == LONGEST_LINE:
        raise ResultError(f"{path} has a line of more than {LONGEST_LINE} bytes; that is not a record of rankscope.")
    try:
        return parse_sealed(line.removesuffix(b"\n"))
    except TruncatedError:
        # This need not be the last line: a resumed run continues after it.
        return None
    except ValueError as error:
        raise ResultError(
            f"{path}, line {number} cannot be read: {error}. Restore the file from a copy, or remove the line; "
            "the other readings do not depend on it."
        ) from error


def _checked_facts(entry: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    if entry["rankscope_gauge"] != SCHEMA:
        raise ResultError(
            f"{path} has schema {entry['rankscope_gauge']!r:.40}; this rankscope reads schema {SCHEMA}. "
            "Read it with the version that wrote it."
        )
    return entry
