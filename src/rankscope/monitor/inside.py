"""Reads the training forward itself, on request: no extra pass, the training batch instead of a fixed probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from torch import nn

from rankscope.errors import SiteError, UnsupportedOperationError
from rankscope.models.inputs import Batch, Padding, TokensPolicy, prepare_inputs
from rankscope.models.loading import load
from rankscope.models.view import ModelView, Stack
from rankscope.models.wrapping import is_compiled
from rankscope.monitor.probing import Prober
from rankscope.runs.readings import LayerValue
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import Observed, Observer, Tracer

T = TypeVar("T")


class ForgivingTracer(Tracer):
    """Keeps the first error in :attr:`error` instead of raising it into the model's forward pass."""

    def __init__(self, view: ModelView, selection: SiteSelection, observe: Observer) -> None:
        super().__init__(view, selection, self._kept_quiet(observe))
        self.error: Exception | None = None

    def _kept_quiet(self, observe: Observer) -> Observer:
        def quiet(ref: SiteRef, seen: Observed) -> None:
            if self.error is None:
                try:
                    observe(ref, seen)
                except Exception as error:  # noqa: BLE001 - kept, and raised by whoever reads `error`
                    self.error = error

        return quiet

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.error is not None:
            return func(*args, **(kwargs or {}))
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except SiteError as error:  # raised before the call was made: make it here
            self.error = error
            return func(*args, **(kwargs or {}))

    def _forgiving(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.error is not None:
            return None
        try:
            return hook(*args, **kwargs)
        except SiteError as error:
            self.error = error
            self._open = None
            return None

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._forgiving(super()._begin_pass, module, args)

    def _enter(self, stack: Stack, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        return partial(self._forgiving, super()._enter(stack, name))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._forgiving(super()._leave, module, args, output)

    def _end_pass(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._forgiving(super()._end_pass, module, args, output)


_ALL = 2**31


class InsideReader:
    """Computes the metrics of a forward pass that the caller runs.

    Args:
        prober: knows the model and its structure.
        policy: which tokens count.
        padding: the argument of the training batches that marks padding, as for ``Gauge``.
    """

    def __init__(self, prober: Prober, policy: TokensPolicy, padding: Padding = None) -> None:
        self._prober = prober
        self._policy = policy
        self._padding = padding
        self._values: tuple[LayerValue, ...] = ()

    def take(self) -> tuple[LayerValue, ...]:
        """Return what was read, and forget it."""
        values, self._values = self._values, ()
        return values

    @contextmanager
    def reading(
        self,
        guarded: Callable[[], AbstractContextManager[None]],
        timed: Callable[[], AbstractContextManager[None]],
        batch: Mapping[str, Any] | None,
    ) -> Iterator[None]:
        """Read the forward pass in the ``with`` block; its own errors are raised, those of the reading are not."""
        tracers: list[ForgivingTracer] = []
        with ExitStack() as stack:
            with guarded(), timed():
                tracers.append(self._tracer(batch))
                stack.enter_context(tracers[0].active())
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
            self._padding = self._padding or prepared.padding  # how the model interprets a mask is tested once
        battery.begin(part)
        return ForgivingTracer(view, battery.selection, battery.observe)
