"""What every host callback shares: the gauge is built when training starts, and nothing it does ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from rankscope.errors import UnknownNameError
from rankscope.models.inputs import Padding, TokensPolicy
from rankscope.models.stream import Stream, stream_of
from rankscope.monitor.acting import LOGGER, Action, Actions
from rankscope.monitor.gauge import Gauge
from rankscope.monitor.outlets import Sink
from rankscope.monitor.probing import Given
from rankscope.monitor.schedules import Schedule, as_schedule
from rankscope.monitor.status import ReadingRequest
from rankscope.runs.readings import Alarm, Heatmap

T = TypeVar("T")


class HostedGauge:
    """A gauge that is built once the host has placed the model on its devices and started its processes.

    Args:
        probe: the inputs on which the model is measured: texts, a tensor, keyword arguments of its forward, or None.
        model: dotted name of the transformer inside the module the host trains, as in ``named_modules``; ``""``
            when that module's own forward takes the probe.
        schedule: ``"1%"`` of the wall time, every so many steps (a whole number), ``"log"``, or a ``Schedule``.
        metrics: names from ``rankscope ls metrics``; None for the cheap default.
        alarms: names from ``ALARMS``; None for all of them, an empty tuple for none.
        actions: ``"log"``, ``"warn"``, ``"stop"`` (ends training through the host), ``"raise"``, or functions.
        sinks: further sinks; the loggers of the host are found automatically.
        record: a folder for the record; None to keep none.
        strict: raise errors of the gauge instead of reporting them and continuing without it.
        sequences: maximum number of sequences of the probe.
        tokens: length at which texts are truncated.
        tokens_policy: ``"content"``, ``"no-first"`` or ``"no-special"``.
        blocks: names or patterns of the block modules, if discovery needs help.
        stream: layout of the residual stream, for a model that does not hold it as ``batch tokens dim`` or
            ``tokens batch dim``: ``Stream("batch dim tokens")``, or the same as text; see ``rankscope.Stream``.
        tokenizer: reads the texts of the probe; that of a ``Trainer`` is found automatically.
        padding: which tokens of tensors do not count, as for ``Gauge``.
        patience: seconds to wait for other ranks where a forward pass needs them.

    Attributes:
        gauge: the gauge while training runs and the last one after it; None before.
    """

    def __init__(
        self,
        probe: Given,
        *,
        model: str = "",
        schedule: str | int | Schedule = "1%",
        metrics: Sequence[str] | None = None,
        alarms: Sequence[str] | None = None,
        actions: Sequence[Action] = ("log",),
        sinks: Sequence[Sink] = (),
        record: str | Path | None = None,
        strict: bool = False,
        sequences: int = 8,
        tokens: int = 128,
        tokens_policy: TokensPolicy = "content",
        blocks: str | Sequence[str] | None = None,
        stream: Stream | str | None = None,
        tokenizer: Any = None,
        padding: Padding = None,
        patience: float = 60.0,
    ) -> None:
        # Invalid arguments are reported where they were written, not when training starts.
        as_schedule(schedule), ReadingRequest(metrics, alarms), Actions(actions, speaks=False)
        self._probe, self._schedule, self._metrics, self._alarms = probe, schedule, metrics, alarms
        self._actions, self._sinks, self._record, self._strict = actions, tuple(sinks), record, strict
        self._sequences, self._tokens, self._tokens_policy = sequences, tokens, tokens_policy
        self._model, self._blocks, self._stream, self._patience = model, blocks, stream_of(stream), patience
        self._tokenizer, self._padding = tokenizer, padding
        self._deaf = False
        self.gauge: Gauge | None = None

    def _start(self, model: nn.Module, loggers: Sequence[Sink]) -> Gauge:
        """Build the gauge; ``loggers`` are those of the host, which receives its scalars another way.

        Raises:
            UnknownNameError: the trained module has no submodule of that name.
        """
        parts = dict(model.named_modules())
        if self._model not in parts:
            raise UnknownNameError(f"part of {type(model).__name__}", self._model, [name for name in parts if name])
        found = (*(WithoutScalars(logger) for logger in loggers), *self._sinks)
        self._deaf = False
        self.gauge = Gauge(
            parts[self._model],
            self._probe,
            schedule=self._schedule,
            metrics=self._metrics,
            alarms=self._alarms,
            actions=self._actions,
            sinks=found,
            record=self._record,
            strict=self._strict,
            sequences=self._sequences,
            tokens=self._tokens,
            tokens_policy=self._tokens_policy,
            blocks=self._blocks,
            stream=self._stream,
            tokenizer=self._tokenizer,
            padding=self._padding,
            patience=self._patience,
        )
        return self.gauge

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


class WithoutScalars:
    """A logger of the host that receives heatmaps and alarms only: scalars go through the host itself.

    Args:
        logger: the sink that writes to it.
    """

    def __init__(self, logger: Sink) -> None:
        self._logger = logger

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Does nothing: the host logs them."""

    def heatmap(self, step: int, heatmap: Heatmap) -> None:
        """Handed on."""
        self._logger.heatmap(step, heatmap)

    def alarm(self, step: int, alarm: Alarm) -> None:
        """Handed on."""
        self._logger.alarm(step, alarm)

    def close(self) -> None:
        """Handed on."""
        self._logger.close()
