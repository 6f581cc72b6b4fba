"""A tracer for forward passes that must not fail: when it loses the stream it falls silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from rankscope._errors import SiteError
from rankscope.models.view import ModelView, Stack
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import Observer, Tracer

T = TypeVar("T")


class ForgivingTracer(Tracer):
    """Keeps the first error in :attr:`error` instead of raising it into the model's forward pass."""

    def __init__(self, view: ModelView, selection: SiteSelection, observe: Observer) -> None:
        super().__init__(view, selection, self._kept_quiet(observe))
        self.error: Exception | None = None

    def _kept_quiet(self, observe: Observer) -> Observer:
        def quiet(ref: SiteRef, seen: Tensor | AttentionCall) -> None:
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
        except SiteError as error:  # raised before the call was made: it is made here instead
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
