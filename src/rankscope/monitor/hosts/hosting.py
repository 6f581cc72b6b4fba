"""What every host callback shares: the gauge is built when training starts, and nothing it does ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from rankscope.errors import UnknownNameError
from rankscope.models.inputs import InputsLike, as_inputs
from rankscope.models.model import Model
from rankscope.models.stream import Stream, stream_of
from rankscope.monitor.acting import LOGGER, Action, Actions
from rankscope.monitor.alarms import ALARMS
from rankscope.monitor.gauge import Gauge
from rankscope.monitor.outlets import Sink
from rankscope.monitor.probing import MetricsLike
from rankscope.monitor.readings import Alarm, Heatmap, Reading
from rankscope.monitor.schedules import Schedule, as_schedule
from rankscope.monitor.status import ReadingRequest
from rankscope.monitor.watched import FirstBatch, Watched

T = TypeVar("T")

FIRST_BATCH: Final = "the first training batch"
"""The probe of a host, if none is given: a slice of the first training batches that the model is called with."""
MAIN = tuple(
    f"rankscope/{name}"
    for name in (
        "relative_residual/least",
        "inputs_relative_residual/least",
        "attention_entropy/least",
        "qk_to_v_gradient/least",
        "weight_motion/most",
        "alarms",
    )
)
"""The scalars that a host prints on the console; all others go to its trackers only."""


class HostedGauge(Watched):
    """A gauge that is built once the host has placed the model on its devices and started its processes.

    Args:
        probe: the inputs on which the model is measured: :class:`rankscope.Inputs`, texts, a tensor, keyword arguments
            of its forward, or None for the built-in text; left out, a slice of the first training batches. The
            tokenizer of a ``Trainer`` is found automatically.
        model: dotted name of the transformer inside the module the host trains, as in ``named_modules``; ``""``
            for that module itself, or for its largest part if it has no forward of its own.
        schedule: ``"1%"`` of the wall time, every so many steps (a whole number), ``"log"``, or a ``Schedule``.
        metrics: names from ``rankscope ls metrics``; None for the cheap default.
        alarms: names from ``ALARMS``; None for all of them, an empty tuple for none.
        actions: ``"log"``, ``"warn"``, ``"stop"`` (ends training through the host), ``"raise"``, or functions.
        sinks: further sinks; the loggers of the host are found automatically.
        record: a folder for the record; None to keep none.
        strict: raise errors of the gauge instead of reporting them and continuing without it.
        blocks: names or patterns of the block modules, if discovery needs help.
        stream: layout of the residual stream, for a model that does not hold it as ``batch tokens dim`` or
            ``tokens batch dim``: ``Stream("batch dim tokens")``, or the same as text; see ``rankscope.Stream``.
        patience: seconds to wait for other ranks where a forward pass needs them.
        silence: names of alarms that are never raised.

    Attributes:
        gauge: the gauge while training runs and the last one after it; None before.
    """

    _logs_main = False
    """Whether the host logs only the main scalars itself, so that its loggers have to be given the others."""

    def __init__(
        self,
        probe: InputsLike = FIRST_BATCH,
        *,
        model: str = "",
        schedule: str | int | Schedule = "1%",
        metrics: MetricsLike = None,
        alarms: Sequence[str] | None = None,
        actions: Sequence[Action] = ("log",),
        sinks: Sequence[Sink] = (),
        record: str | Path | None = None,
        strict: bool = False,
        blocks: str | Sequence[str] | None = None,
        stream: Stream | str | None = None,
        patience: float = 60.0,
        silence: Sequence[str] = (),
    ) -> None:
        # Invalid arguments are reported where they were written, not when training starts.
        super().__init__()
        as_schedule(schedule), ReadingRequest(metrics, alarms), Actions(actions, speaks=False)
        self._from_batch, self._silenced = probe is FIRST_BATCH, [ALARMS[name].name for name in silence]
        self._batches: FirstBatch | None = None
        self._probe, self._schedule, self._metrics, self._alarms_wanted = (
            as_inputs(None if self._from_batch else probe),
            schedule,
            metrics,
            alarms,
        )
        self._actions, self._sinks, self._record, self._strict = actions, tuple(sinks), record, strict
        self._model, self._blocks, self._stream, self._patience = model, blocks, stream_of(stream), patience
        self._deaf = False
        self.gauge: Gauge | None = None

    def _start(self, model: nn.Module, loggers: Sequence[Sink], optimizers: Sequence[Optimizer] = ()) -> None:
        """Get ready; the gauge is built now, or before the first step if its probe is the first training batch.

        ``loggers`` are those of the host, which prints the main scalars itself.

        Raises:
            UnknownNameError: the trained module has no submodule of that name.
        """
        parts = dict(model.named_modules())
        if self._model not in parts:
            raise UnknownNameError(f"part of {type(model).__name__}", self._model, [name for name in parts if name])
        found = (*(Beside(logger, MAIN if self._logs_main else None) for logger in loggers), *self._sinks)
        self._deaf, self.gauge = False, None
        self._rows, self._alarms, self._readings = [], [], []
        part = parts[self._model] if self._model else _with_forward(model)

        def build(probe: InputsLike) -> Gauge:
            read = part if self._batches is None else self._batches.module
            gauge = Gauge(
                Model(read, blocks=self._blocks, stream=self._stream),
                probe,
                schedule=self._schedule,
                metrics=self._metrics,
                alarms=self._alarms_wanted,
                actions=self._actions,
                sinks=found,
                record=self._record,
                strict=self._strict,
                patience=self._patience,
            )
            gauge.optimizers = tuple(optimizers)
            gauge.silence(*self._silenced)
            return gauge

        self._build = build
        self._close_batches()
        if self._from_batch:
            self._batches = FirstBatch(part)
        else:
            self.gauge = build(self._probe)

    def _before_backward(self, loss: object) -> None:
        if self.gauge is not None and isinstance(loss, Tensor):
            self.gauge.before_backward(loss)

    def _read_gradients(self, step: int) -> None:
        """Before a step of the optimizer: build the gauge if it waits for a batch, and read the gradients."""
        if self.gauge is None and self._batches is not None:
            probe = self._batches.probe()
            if probe is None:
                LOGGER.error(
                    "Nothing is watched: the model was not called with a training batch before the first step. Name "
                    "the part of the module that is called with model=, or pass a probe."
                )
                self._close_batches()
                return
            self.gauge = self._build(probe)
        if self.gauge is not None:
            self.gauge.after_backward(step)

    def _read(self, step: int, loss: float | Tensor | None = None, batch: Any = None) -> Reading | None:
        """After a step of the optimizer: take a reading, if one is due."""
        if self.gauge is None:
            return None
        if batch is None and self._batches is not None and self._batches.latest is not None:
            batch = {name: value for name, value in self._batches.latest.items() if isinstance(value, Tensor)} or None
        reading = self.gauge.step(step, loss=loss, batch=batch)
        if reading is not None:
            self._keep(reading)
        return reading

    def _stop(self) -> None:
        """The run is over: remove hooks and close the gauge."""
        self._close_batches()
        if self.gauge is not None:
            self.gauge.close()

    def _close_batches(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._batches = None

    def _sinks_for(self, loggers: Iterable[T], sinks_of: Callable[[T], Iterator[Sink]]) -> tuple[Sink, ...]:
        """Sinks for the loggers of the host; one that cannot be used is reported and skipped."""
        found: list[Sink] = []
        for logger in loggers:
            try:
                found += sinks_of(logger)
            except Exception as error:
                if self._strict:
                    raise
                LOGGER.warning("%s gets no heatmaps and alarms: %s", type(logger).__name__, error)
        return tuple(found)

    def _tell_host(self, log: Callable[[], None]) -> None:
        """Pass a reading to the host's own logging; if that fails once, no more are passed."""
        if self._deaf:
            return
        try:
            log()
        except Exception:
            if self._strict:
                raise
            self._deaf = True
            LOGGER.exception("The host could not log a reading and gets no more of them; the run continues.")


class Beside:
    """A logger of the host that receives heatmaps, alarms, and the scalars that the host does not log itself.

    Args:
        logger: the sink that writes to it.
        logged: names of the scalars that the host logs; None for all.
    """

    def __init__(self, logger: Sink, logged: Sequence[str] | None) -> None:
        self._logger, self._logged = logger, logged

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Those that the host does not log."""
        if self._logged is not None:
            self._logger.scalars(step, {name: value for name, value in values.items() if name not in self._logged})

    def heatmap(self, step: int, heatmap: Heatmap) -> None:
        """Handed on."""
        self._logger.heatmap(step, heatmap)

    def alarm(self, step: int, alarm: Alarm) -> None:
        """Handed on."""
        self._logger.alarm(step, alarm)

    def close(self) -> None:
        """Handed on."""
        self._logger.close()


def main_scalars(reading: Reading) -> dict[str, float]:
    """What a host prints."""
    return {name: reading.scalars[name] for name in MAIN if name in reading.scalars}


def _with_forward(module: nn.Module) -> nn.Module:
    """The module, or its largest part if it does not define what calling it does."""
    own = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    if own is nn.Module or own.__name__ == "LightningModule":
        parts = list(module.children())
        return max(parts, key=lambda part: sum(p.numel() for p in part.parameters())) if parts else module
    return module
