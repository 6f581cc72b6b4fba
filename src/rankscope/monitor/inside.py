"""Reads the training forward itself: no extra pass, the training batches instead of a fixed probe.

:class:`InsideReader` reads all metrics of a forward that runs as written. :class:`GraphReader` reads two norms of every
training forward, compiled or not: its hooks are part of the graph that ``torch.compile`` builds, without a graph break.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rankscope._types import Status
from rankscope.errors import InputError, SiteError, UnsupportedOperationError
from rankscope.models.inputs import Batch, Padding, TokensPolicy, prepare_inputs
from rankscope.models.loading import load
from rankscope.models.view import ModelView, Stack
from rankscope.models.wrapping import is_compiled, unwrapped
from rankscope.monitor.probing import Prober
from rankscope.monitor.readings import LayerValue
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

    def _begin_pass(self) -> None:
        self._forgiving(super()._begin_pass)

    def _enter(self, stack: Stack, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        return partial(self._forgiving, super()._enter(stack, name))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._forgiving(super()._leave, module, args, output)

    def _end_pass(self, output: Any) -> None:
        self._forgiving(super()._end_pass, output)


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
                "All metrics of a compiled forward cannot be read. Use where='graph', which reads norms as part of the "
                "compiled graph, or where='probe', which runs the model as written."
            )
        view, _, _ = self._prober.set_up()
        part = Batch({}, None, 0, 0)
        if batch is not None:
            prepared = prepare_inputs(load(model), batch, batch=_ALL, tokens_policy=self._policy, padding=self._padding)
            part = prepared[0]
            self._padding = self._padding or prepared.padding  # how the model interprets a mask is tested once
        battery.begin(part)
        return ForgivingTracer(view, battery.selection, battery.observe)


GRAPH_METRICS = ("relative_residual", "stream_rms")
"""What is read inside a compiled forward: one norm, and one after the mean token is subtracted."""
_FIELDS = ("sum", "least", "most", "count")
_START = (0.0, torch.inf, -torch.inf, 0.0)
_WIDTH = len(GRAPH_METRICS) * len(_FIELDS) + 1


@torch.library.custom_op(
    "rankscope::note_norms", mutates_args={"totals"}, schema="(Tensor x, Tensor(a!) totals, int row) -> ()"
)
def note_norms(x: Tensor, totals: Tensor, row: int) -> None:
    """Add the norms of a stream, ``batch tokens dim``, to a row of ``totals``.

    An operator of its own, not a few torch calls: the compiler must not fuse it with the model, because another order
    of the model's own sums would change the last bits of the loss.
    """
    wide = x.double() if x.dtype == torch.float64 else x.float()
    tokens, dim = x.shape[1:]
    centre = wide.mean(1, keepdim=True)
    apart = torch.linalg.vector_norm(wide - centre, dim=(1, 2)).square()
    energy = apart + tokens * centre.square().sum((1, 2))
    relative = (apart / energy).sqrt() if tokens > 1 else torch.full_like(energy, torch.nan)
    values = torch.stack((relative, (energy / (tokens * dim)).sqrt())).to(totals.dtype)
    is_finite = energy.isfinite()
    known = is_finite & values.isfinite()
    own = totals[row, :-1].view(len(GRAPH_METRICS), len(_FIELDS))
    own[:, 0] += values.where(known, 0.0).sum(1)
    own[:, 1] = torch.minimum(own[:, 1], values.where(known, torch.inf).amin(1))
    own[:, 2] = torch.maximum(own[:, 2], values.where(known, -torch.inf).amax(1))
    own[:, 3] += known.sum(1)
    totals[row, -1] += (~is_finite).sum()


@note_norms.register_fake
def _(x: Tensor, totals: Tensor, row: int) -> None:
    return None


class GraphReader:
    """Reads the norms of every training forward after every block, inside the graph of a compiled model.

    Sums are kept on the device of each block and copied once per reading. Every token counts, padding too. Passes in
    evaluation mode are not read. The hooks stay on the model until :meth:`close`.

    Args:
        prober: knows the model and its structure.

    Raises:
        UnsupportedOperationError: the blocks of this model cannot be read in this way.
    """

    def __init__(self, prober: Prober) -> None:
        view, _, _ = prober.set_up()
        self._places = [(stack.name, call.first_layer) for stack in view.stacks for call in stack.calls]
        self._totals: dict[torch.device, Tensor] = {}
        self._handles = ExitStack()
        modules = view.modules()
        refuse_in_graph(view)
        for row, (stack, call) in enumerate((own, call) for own in view.stacks for call in own.calls):
            block = unwrapped(modules[call.module_name])
            totals = self._totals_on(next((p.device for p in block.parameters()), torch.device("cpu")))
            hook = block.register_forward_hook(_noting(totals, row, tokens_first=stack.layout == "tokens batch dim"))
            self._handles.callback(hook.remove)

    def _totals_on(self, device: torch.device) -> Tensor:
        if device not in self._totals:
            dtype = torch.float32 if device.type == "mps" else torch.float64
            self._totals[device] = torch.empty(len(self._places), _WIDTH, dtype=dtype, device=device)
            _start_over(self._totals[device])
        return self._totals[device]

    def take(self) -> tuple[LayerValue, ...]:
        """The values of all training forwards since the last call.

        Raises:
            UnsupportedOperationError: there were none, or they ran without the hooks.
        """
        seen = [totals.to("cpu", copy=True).double() for totals in self._totals.values()]
        for totals in self._totals.values():
            _start_over(totals)
        found: list[LayerValue] = []
        for row, (stack, layer) in enumerate(self._places):
            # A block runs on one device; the rows of the others are untouched.
            own = max((part[row] for part in seen), key=lambda entries: float(entries[-1] + entries[3] + entries[7]))
            found += _rows(own, stack, layer)
        if not found:
            raise UnsupportedOperationError(
                "No training forward was seen since the last reading. A compiled model must be compiled after the "
                "gauge is created: create the gauge before the first step, or call torch._dynamo.reset(). Forwards in "
                "evaluation mode are not read."
            )
        return tuple(found)

    def close(self) -> None:
        """Remove the hooks."""
        self._handles.close()


def _start_over(totals: Tensor) -> None:
    """In place: compiled code holds on to this tensor."""
    with torch.no_grad():
        totals.copy_(torch.tensor([*_START * len(GRAPH_METRICS), 0.0], dtype=totals.dtype).expand_as(totals))


def _noting(totals: Tensor, row: int, *, tokens_first: bool) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not module.training:
            return
        x = output if isinstance(output, Tensor) else output[0]
        note_norms(x.detach().transpose(0, 1) if tokens_first else x.detach(), totals, row)

    return hook


def _rows(entries: Tensor, stack: str | None, layer: int) -> Iterator[LayerValue]:
    *numbers, broken = entries.tolist()
    for place, metric in enumerate(GRAPH_METRICS):
        total, least, most, count = numbers[place * len(_FIELDS) :][: len(_FIELDS)]
        if count:
            yield LayerValue(metric, "block.out", stack, layer, total / count, least, most)
        elif broken:
            yield LayerValue(metric, "block.out", stack, layer, torch.nan, torch.nan, torch.nan, str(Status.NOT_FINITE))


def refuse_in_graph(view: ModelView) -> None:
    """Check that each block is one module that runs once in a forward pass and returns the stream first.

    Raises:
        UnsupportedOperationError: this is not so, or blocks run again in the backward pass.
    """
    names = [call.module_name for stack in view.stacks for call in stack.calls]
    why = None
    if any(not stack.stream.is_plain for stack in view.stacks):
        why = "the residual stream is not the first tensor that a block returns"
    elif len(set(names)) < len(names):
        why = "several layers share one module"
    elif any(len(call.blocks) > 1 for stack in view.stacks for call in stack.calls):
        why = "its blocks are not modules"
    elif any(getattr(module, "gradient_checkpointing", False) for module in view.model.modules()):
        why = "gradient checkpointing runs its blocks a second time"
    if why is not None:
        raise UnsupportedOperationError(f"where='graph' cannot read this model: {why}. Use where='probe'.")


def graph_metrics(names: Sequence[str] | None) -> Sequence[str]:
    """The metrics of ``where="graph"``.

    Raises:
        InputError: another one was asked for.
    """
    others = [name for name in names or () if name not in GRAPH_METRICS]
    if others:
        raise InputError(
            f"where='graph' reads {' and '.join(GRAPH_METRICS)} only, not {', '.join(others)}: everything else needs "
            "attention or a spectrum. Use where='probe' for these, or two gauges."
        )
    return GRAPH_METRICS if names is None else names
