"""Reading the training forward itself, by choice: no extra pass, the training batch instead of a fixed probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from rankscope._errors import UnsupportedOperationError
from rankscope.models.inputs import Batch, Padding, TokensPolicy, prepare_inputs
from rankscope.models.loading import load
from rankscope.monitor.forgiving import ForgivingTracer
from rankscope.monitor.probing import Prober
from rankscope.monitor.wrappers import is_compiled
from rankscope.runs.readings import LayerValue

_ALL = 2**31


class InsideReader:
    """Takes the battery of a forward pass that somebody else runs.

    Args:
        prober: knows the model and its structure.
        policy: which tokens count.
        padding: the argument of the training batches that says what is padding, as ``Gauge`` takes it.
    """

    def __init__(self, prober: Prober, policy: TokensPolicy, padding: Padding = None) -> None:
        self._prober = prober
        self._policy = policy
        self._padding = padding
        self._values: tuple[LayerValue, ...] = ()

    def take(self) -> tuple[LayerValue, ...]:
        """What was read, once."""
        values, self._values = self._values, ()
        return values

    @contextmanager
    def reading(
        self,
        guarded: Callable[[], AbstractContextManager[None]],
        timed: Callable[[], AbstractContextManager[None]],
        batch: Mapping[str, Any] | None,
    ) -> Iterator[None]:
        """Read the forward pass in the ``with`` block; its own errors go through, those of the reading do not."""
        tracers: list[ForgivingTracer] = []
        with ExitStack() as stack:
            with guarded(), timed():
                tracers.append(self._tracer(batch))
                stack.enter_context(tracers[0].riding())
            yield
        for tracer in tracers:
            with guarded(), timed():
                if tracer.error is not None:
                    raise tracer.error
                self._values = self._prober.battery.values()

    def _tracer(self, batch: Mapping[str, Any] | None) -> ForgivingTracer:
        model, battery = self._prober.model, self._prober.battery
        if is_compiled(model):
            raise UnsupportedOperationError(
                "The inside of a compiled forward cannot be read. Use where='probe', which runs the model as written."
            )
        view, _, _ = self._prober.set_up()
        part = Batch({}, None, 0, 0)
        if batch is not None:
            prepared = prepare_inputs(load(model), batch, batch=_ALL, tokens_policy=self._policy, padding=self._padding)
            part = prepared[0]
            self._padding = self._padding or prepared.padding  # how a mask is read is tried on the model once
        battery.begin(part)
        return ForgivingTracer(view, battery.selection, battery.observe)
