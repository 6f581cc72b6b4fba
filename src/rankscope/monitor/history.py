"""Layer-by-step heatmaps of the whole training run in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rankscope.monitor.readings import Heatmap, Reading


class History:
    """Keeps a bounded number of readings, evenly spaced: when full, every second one is dropped.

    Args:
        columns: maximum number of readings.
    """

    def __init__(self, columns: int = 64) -> None:
        self._columns = columns
        self._every = 1
        self._count = 0
        self._readings: list[tuple[int, dict[tuple[str, str | None], dict[int, float]]]] = []
        self._alarms: list[tuple[str | None, int, int, str]] = []

    def take(self, reading: Reading) -> None:
        """Add a reading."""
        self._alarms += [
            (a.stack, a.step, a.layer, a.name) for a in reading.alarms if a.state == "raised" and a.layer is not None
        ]
        self._alarms = self._alarms[-self._columns :]
        # Keep every ``_every``-th reading, so that columns stay evenly spaced after each thinning.
        if self._count % self._every == 0:
            columns: dict[tuple[str, str | None], dict[int, float]] = {}
            for row in reading.table:
                if row.layer is None:
                    continue
                columns.setdefault((row.metric, row.stack), {})[row.layer] = row.mean
            self._readings.append((reading.step, columns))
        self._count += 1
        if len(self._readings) > self._columns:
            self._readings = self._readings[::2]
            self._every *= 2

    def heatmaps(self) -> Iterator[Heatmap]:
        """One heatmap per metric and stack."""
        kinds = dict.fromkeys(kind for _, columns in self._readings for kind in columns)
        steps = tuple(step for step, _ in self._readings)
        for metric, stack in kinds:
            found = [columns.get((metric, stack), {}) for _, columns in self._readings]
            layers = tuple(sorted({layer for column in found for layer in column}))
            values = tuple(tuple(column.get(layer, math.nan) for column in found) for layer in layers)
            alarms = tuple((step, layer, name) for name_of, step, layer, name in self._alarms if name_of == stack)
            yield Heatmap(metric, stack, layers, steps, values, alarms)
