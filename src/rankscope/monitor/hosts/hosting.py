"""What every host callback shares: the gauge is built when training starts, and nothing it does ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from rankscope.errors import UnknownNameError
from rankscope.models.inputs import InputsLike, as_inputs
from rankscope.models.model import Model
from rankscope.models.stream import Stream
from rankscope.monitor.acting import LOGGER
from rankscope.monitor.outlets import Sink
from rankscope.monitor.readings import Alarm, Reading
from rankscope.monitor.watched import FirstBatch, Watched

T = TypeVar("T")


class HostedGauge(Watched):
    """A gauge that is built once the host has placed the model on its devices and started its processes.

    Args:
        probe: the inputs on which the model is measured: :class:`rankscope.Inputs`, texts, a tensor, or keyword
            arguments of its forward; None for a slice of the first training batches. The tokenizer of a ``Trainer`` is
            found automatically.
        model: dotted name of the transformer inside the module the host trains, as in ``named_modules``; ``""``
            for that module itself, or for its largest part if it has no forward of its own.
        blocks: names or patterns of the block modules, if discovery needs help.
        stream: layout of the residual stream, for a model that does not hold it as ``batch tokens dim`` or
            ``tokens batch dim``: ``Stream("batch dim tokens")``, or the same as text; see ``rankscope.Stream``.
        silence: names of alarms that are never raised.
        **options: ``schedule``, ``metrics``, ``alarms``, ``actions``, ``sinks``, ``record``, ``strict`` and
            ``patience``, as for :class:`~rankscope.monitor.Gauge`. ``"stop"`` ends training through the host, and its
            loggers are found automatically.

    Attributes:
        gauge: the gauge while training runs and the last one after it; None before.
    """

    def __init__(
        self,
        probe: InputsLike = None,
        *,
        model: str = "",
        blocks: str | Sequence[str] | None = None,
        stream: Stream | str | None = None,
        silence: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(None if probe is None else as_inputs(probe), silence, options)
        self._model, self._blocks, self._stream = model, blocks, stream
        self._deaf = False

    def _start(self, model: nn.Module, loggers: Sequence[Sink], optimizers: Sequence[Optimizer] = ()) -> None:
        """Get ready; the gauge is built now, or before the first step if its probe is the first training batch.

        ``loggers`` are those of the host, which logs scalars itself.

        Raises:
            UnknownNameError: the trained module has no submodule of that name.
        """
        parts = dict(model.named_modules())
        if self._model not in parts:
            raise UnknownNameError(f"part of {type(model).__name__}", self._model, [name for name in parts if name])
        sinks = (*map(AlarmsOnly, loggers), *self._options.get("sinks", ()))
        self._start_over()
        self._deaf = False
        part = parts[self._model] if self._model else _with_forward(model)
        self._build = partial(
            self._make, Model(part, blocks=self._blocks, stream=self._stream), optimizers, sinks=sinks
        )
        self._close_batches()
        if self._probe is None:
            self._batches = FirstBatch(part)
        else:
            self._build()

    def _before_backward(self, loss: object) -> None:
        if self.gauge is not None and isinstance(loss, Tensor):
            self.gauge.before_backward(loss)

    def _read_gradients(self, step: int) -> None:
        """Before a step of the optimizer: build the gauge if it waits for a batch, and read the gradients."""
        if self.gauge is None and self._batches is not None:
            self._build()
        if self.gauge is not None:
            self.gauge.after_backward(step)

    def _read(self, step: int, loss: float | Tensor | None = None, batch: Any = None) -> Reading | None:
        """After a step of the optimizer: take a reading, if one is due."""
        if self.gauge is None:
            return None
        if batch is None and self._batches is not None:
            batch = self._batches.take_latest()
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
                if self._options.get("strict"):
                    raise
                LOGGER.warning("%s gets no alarms: %s", type(logger).__name__, error)
        return tuple(found)

    def _tell_host(self, log: Callable[[], None]) -> None:
        """Pass a reading to the host's own logging; if that fails once, no more are passed."""
        if self._deaf:
            return
        try:
            log()
        except Exception:
            if self._options.get("strict"):
                raise
            self._deaf = True
            LOGGER.exception("The host could not log a reading and gets no more of them; the run continues.")


class AlarmsOnly:
    """A logger of the host, which is given the scalars by the host itself."""

    def __init__(self, logger: Sink) -> None:
        self._logger = logger

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing: the host logs them."""

    def alarm(self, step: int, alarm: Alarm) -> None:
        """Handed on."""
        self._logger.alarm(step, alarm)

    def close(self) -> None:
        """Handed on."""
        self._logger.close()


def _with_forward(module: nn.Module) -> nn.Module:
    """The module, or its largest part if it does not define what calling it does."""
    own = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    if own is nn.Module or own.__name__ == "LightningModule":
        parts = list(module.children())
        return max(parts, key=lambda part: sum(p.numel() for p in part.parameters())) if parts else module
    return module
