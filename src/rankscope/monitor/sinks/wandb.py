"""Weights & Biases, online or offline: scalars, alarms as alerts and text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rankscope.errors import InputError, MissingExtraError
from rankscope.monitor.readings import Alarm
from rankscope.monitor.sinks.words import ALARM_NAME, title

if TYPE_CHECKING:
    from wandb import Run

__all__ = ["WandbSink"]

STEP_NAME = "rankscope/step"
_LONGEST_TITLE = 63


class WandbSink:
    """Adds to your W&B run without advancing its step counter.

    W&B drops rows for steps before its own counter, and every committed row advances that counter. So values are
    added to the current row, which your next ``run.log`` commits; only if a second reading finds the first one
    still uncommitted is that row committed here. Charts use the gauge's own ``rankscope/step`` as their axis.

    Args:
        run: what ``wandb.init`` returned; None for the current run.

    Raises:
        MissingExtraError: wandb is not installed.
        InputError: there is no current run.
    """

    def __init__(self, run: Run | None = None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("WandbSink", "wandb", "wandb") from error
        found = wandb.run if run is None else run
        if found is None:
            raise InputError(
                "There is no W&B run to write to. Call wandb.init() first; mode='offline' needs no network."
            )
        self._run = found
        self._open_row: int | None = None
        self._step: int | None = None
        found.define_metric(STEP_NAME, hidden=True)
        found.define_metric("rankscope/*", step_metric=STEP_NAME)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Every name as a chart."""
        self._add(step, dict(values))

    def alarm(self, step: int, alarm: Alarm) -> None:
        """An alert, which W&B can forward, and the sentence in the history."""
        level = "WARN" if alarm.state == "raised" else "INFO"
        self._run.alert(title(alarm)[:_LONGEST_TITLE], alarm.sentence, level=level, wait_duration=0)
        self._add(step, {f"{ALARM_NAME}/{alarm.name}": alarm.sentence})

    def close(self) -> None:
        """Does nothing: you finish the run."""

    def _add(self, step: int, values: dict[str, Any]) -> None:
        if self._step is not None and step != self._step and self._run.step == self._open_row:
            self._run.log({}, commit=True)
        self._run.log({**values, STEP_NAME: step}, commit=False)
        self._step, self._open_row = step, self._run.step
