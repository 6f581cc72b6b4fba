"""Where readings go: the record and the sinks. One that fails is dropped, the others go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rankscope._errors import InputError
from rankscope.monitor.acting import LOGGER
from rankscope.monitor.protocol import Sink
from rankscope.monitor.record_writing import RecordWriter
from rankscope.runs.gauge_history import History
from rankscope.runs.readings import Reading

HEATMAP_EVERY = 16
"""Readings between two heatmaps; a picture costs more than a number."""


class Outlets:
    """Writes every reading to the record and to each sink.

    Args:
        sinks: in order.
        record: a folder, or None.
        facts: what the record says about the gauge.
        strict: raise when one fails.
    """

    def __init__(
        self, sinks: Sequence[Sink], record: str | Path | None, facts: Mapping[str, Any], *, strict: bool
    ) -> None:
        for sink in sinks:
            if not isinstance(sink, Sink):
                raise InputError(f"{sink!r} is no sink: it needs the methods scalars, heatmap, alarm and close.")
        self._sinks = list(sinks)
        self._writer = None if record is None else RecordWriter(Path(record), facts)
        self._history = History() if sinks else None
        self._count = 0
        self._strict = strict
        self._closed = False

    def write(self, reading: Reading) -> None:
        """Record first, then the sinks."""
        if self._writer is not None:
            writer = self._writer
            if not self._tried("The record", lambda: writer.write(reading)):
                self._writer = None
        if self._history is not None:
            self._history.take(reading)
        self._count += 1
        with_heatmap = self._count % HEATMAP_EVERY == 0
        self._each(lambda sink: self._tell(sink, reading, with_heatmap=with_heatmap))

    def close(self, step: int) -> None:
        """The last heatmaps, then close everything; only once."""
        if self._closed:
            return
        self._closed = True
        if self._writer is not None:
            self._tried("The record", self._writer.close)
        if self._count % HEATMAP_EVERY != 0:
            self._each(lambda sink: self._draw(sink, step))
        self._each(lambda sink: sink.close())

    def _tell(self, sink: Sink, reading: Reading, *, with_heatmap: bool) -> None:
        sink.scalars(reading.step, reading.scalars)
        for alarm in reading.alarms:
            sink.alarm(reading.step, alarm)
        if with_heatmap:
            self._draw(sink, reading.step)

    def _draw(self, sink: Sink, step: int) -> None:
        if self._history is not None:
            for heatmap in self._history.heatmaps():
                sink.heatmap(step, heatmap)

    def _each(self, act: Callable[[Sink], None]) -> None:
        self._sinks = [sink for sink in self._sinks if self._tried(type(sink).__name__, partial(act, sink))]

    def _tried(self, name: str, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception:
            if self._strict:
                raise
            LOGGER.exception("%s failed and gets no more readings of the gauge; the run goes on.", name)
            return False
        return True
