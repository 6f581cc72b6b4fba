"""trackio: scalars, alarms as alerts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rankscope.errors import InputError, MissingExtraError
from rankscope.monitor.readings import Alarm
from rankscope.monitor.sinks.words import title

if TYPE_CHECKING:
    from trackio.run import Run

__all__ = ["TrackioSink"]


class TrackioSink:
    """Writes to your trackio run.

    Args:
        run: what ``trackio.init`` returned; None for the current run.

    Raises:
        MissingExtraError: trackio is not installed.
        InputError: there is no current run.
    """

    def __init__(self, run: Run | None = None) -> None:
        try:
            import trackio
            from trackio import context_vars
        except ImportError as error:
            raise MissingExtraError("TrackioSink", "trackio", "trackio") from error
        found = context_vars.current_run.get() if run is None else run
        if found is None:
            raise InputError("There is no trackio run to write to. Call trackio.init() first, or pass run.")
        self._run = found
        self._levels = trackio.AlertLevel

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """All of them at this step."""
        self._run.log(dict(values), step=step)

    def alarm(self, step: int, alarm: Alarm) -> None:
        """An alert, which trackio shows in its dashboard and can forward."""
        level = self._levels.WARN if alarm.state == "raised" else self._levels.INFO
        self._run.alert(title(alarm), alarm.sentence, level=level, step=step)

    def close(self) -> None:
        """Does nothing: you finish the run."""
