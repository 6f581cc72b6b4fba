"""What a place to write to has to offer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from rankscope.runs.readings import Alarm, Heatmap


@runtime_checkable
class Sink(Protocol):
    """Somewhere numbers go: a dashboard, a tracker, a file. Called on rank 0 only.

    A sink that raises is dropped, with one message that names the cause; the gauge goes on.
    """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A few finite numbers by name, once per reading."""
        ...

    def heatmap(self, step: int, heatmap: Heatmap) -> None:
        """One metric over layers and steps, now and then and when the gauge is closed."""
        ...

    def alarm(self, step: int, alarm: Alarm) -> None:
        """An alarm that was raised or cleared."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...
