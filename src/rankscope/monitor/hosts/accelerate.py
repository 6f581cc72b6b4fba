"""The gauge in a loop that runs on accelerate: a plain loop whose scalars go through ``accelerator.log``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rankscope.monitor.outlets import Sink
from rankscope.monitor.readings import Alarm
from rankscope.monitor.sinks import sinks_of

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["AcceleratorSink"]


class AcceleratorSink:
    """Writes to the trackers that ``accelerator.init_trackers`` started: scalars to all, alarms to those it knows.

    Args:
        accelerator: yours. Trackers are looked up when something is written, so it may be given before they start.

    Example::

        gauge = Gauge(model, probe, sinks=[AcceleratorSink(accelerator)], record="runs/gauge")
        for step, batch in enumerate(loader):
            ...
            accelerator.backward(loss)
            gauge.after_backward(step)
            optimizer.step(); optimizer.zero_grad()
            gauge.step(step)
        gauge.close()               # before accelerator.end_training(), which ends the trackers
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._of_trackers: dict[int, tuple[Any, tuple[Sink, ...]]] = {}

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Through ``accelerator.log``."""
        self._accelerator.log(dict(values), step=step)

    def alarm(self, step: int, alarm: Alarm) -> None:
        """To TensorBoard, W&B, MLflow and trackio, where one of them is a tracker."""
        for sink in self._sinks():
            sink.alarm(step, alarm)

    def close(self) -> None:
        """Nothing: ``accelerator.end_training`` ends the trackers."""

    def _sinks(self) -> Iterator[Sink]:
        for tracker in self._accelerator.trackers:
            if id(tracker) not in self._of_trackers:
                # The tracker is kept beside its sinks, so that its id is not given to another.
                target = tracker.tracker.info.run_id if tracker.name == "mlflow" else tracker.tracker
                self._of_trackers[id(tracker)] = (tracker, tuple(sinks_of(tracker.name, target)))
            yield from self._of_trackers[id(tracker)][1]
