"""The tracer: shows the residual stream of a running model at every site.

The model's own code runs unchanged and the tracer only observes, so outputs are bit-identical. Observers receive
tensors of shape ``batch tokens dim``, at sites of several streams ``batch tokens streams dim``, and must reduce them
immediately: the tracer stores nothing.

A fused attention kernel does not expose the logarithm of each row's sum of exponentials in Python, but PyTorch's CPU
kernel returns it internally for the backward pass. Given these log-sums, the probabilities of any tile follow from
queries and keys alone, which saves one walk over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.models.inputs import sequences_in_pass
from rankscope.models.view import Label, ModelView, Stack
from rankscope.pass_graph.ir import Graph
from rankscope.pass_graph.record import GraphRecorder
from rankscope.stream.attention_calls import (
    AttentionCall,
    from_flex,
    from_sdpa,
    from_softmax,
    listening,
    sdpa_arguments,
)
from rankscope.stream.branch_inputs import BranchInputs
from rankscope.stream.mode import ActiveBlock, Perform, SiteMode, observing, unseen
from rankscope.stream.operators import SOFTMAXES
from rankscope.stream.recurrent_states import RecurrentStates
from rankscope.stream.routers import TOP_K, MixtureOfExperts, RouterWatch, mixtures_in
from rankscope.stream.sites import ATTENTION_ENDS, SiteRef, SiteSelection

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_WORTH_ENTRIES = 1 << 20


def watching_kernel(query: Tensor, key: Tensor) -> AbstractContextManager[GraphRecorder | None]:
    """Record what one fused call runs if that pays off: for long sequences of plain tensors on a CPU."""
    plain = type(query) is Tensor and type(key) is Tensor
    if not plain or query.device.type != "cpu":
        return nullcontext()
    entries = query.shape[:-1].numel() * key.shape[-2]
    return GraphRecorder(keeps=True) if entries >= _WORTH_ENTRIES else nullcontext()


def log_sums_in(recorded: Graph) -> Tensor | None:
    """``(batch, heads, query)``, from the one kernel that ran; None if there was none, or several."""
    found = [node.outputs[1].content for node in recorded.nodes if node.run is _KERNEL]
    return found[0] if len(found) == 1 else None


@dataclass(frozen=True)
class Unreadable:
    """Shown at a site that exists but could not be read, with the reason."""

    why: str


Observed = Tensor | tuple[Tensor, ...] | AttentionCall | Unreadable
"""What a site shows: a tensor, the tensors of which a side makes its view, or an attention call."""

Observer = Callable[[SiteRef, Observed], None]


@contextmanager
def trace(view: ModelView, selection: SiteSelection, observe: Observer) -> Iterator[None]:
    """Observe the selected sites of every forward pass of ``view.model`` inside the ``with`` block.

    Blocks that run again in a backward pass (gradient checkpointing) are not shown a second time.

    Raises:
        SiteError: a block or a skip add does not occur as it did when the model was probed.
    """
    with Tracer(view, selection, observe).active():
        yield


class Tracer(SiteMode):
    """Shows the selected sites to an observer."""

    def __init__(self, view: ModelView, selection: SiteSelection, observe: Observer) -> None:
        super().__init__(view, selection)
        self._observe = observe
        self._routers: list[RouterWatch] = []
        self._room: Tensor | None = None
        self._inputs: BranchInputs | None = None
        self._following = ExitStack()
        self._states: RecurrentStates | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        # The innermost mixture is the one that runs: its softmax and top-k tell which experts a token is sent to.
        if self._routers and (func in TOP_K or func in SOFTMAXES):
            with unseen():
                self._routers[-1].see_call(func, args, kwargs or {}, out)
        return out

    def _hooks(self, modules: Mapping[str, nn.Module]) -> Iterator[torch.utils.hooks.RemovableHandle]:
        if self._selection.wants("attention.state"):
            yield self.view.model.register_forward_pre_hook(self._ask_for_states, with_kwargs=True)
        yield from super()._hooks(modules)

    def _ask_for_states(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._states = RecurrentStates(module, kwargs)
        return args, {**kwargs, **self._states.arguments}

    def _inner_hooks(self, block: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        yield from super()._inner_hooks(block)
        if not self._selection.wants("mlp.router"):
            return
        mixtures = mixtures_in(block)
        for mixture in mixtures:
            owner = block.get_submodule(mixture.owner)
            yield owner.register_forward_pre_hook(self._enter_mixture(mixture))
            for name in mixture.experts:
                yield block.get_submodule(name).register_forward_pre_hook(self._enter_experts, with_kwargs=True)
            yield owner.register_forward_hook(self._leave_mixture(alone=len(mixtures) == 1), always_call=True)

    def _enter_mixture(self, mixture: MixtureOfExperts) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            batch, tokens = (0, 0) if self._open is None else self._open.batch_and_tokens()
            self._routers.append(RouterWatch(mixture, batch * tokens))

        return hook

    def _enter_experts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._routers:
            self._routers[-1].see_experts(args, kwargs)

    def _leave_mixture(self, *, alone: bool) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            watch, call = self._routers.pop(), self._open
            if call is None or output is None or (ref := call.ref("mlp.router")) not in self._selection:
                return
            with unseen():
                routing = watch.routing() if alone else None
            if routing is None:
                why = watch.refused or "the block has several mixtures of experts"
                self.show(ref, Unreadable(f"the router of {type(module).__name__} cannot be read, because {why}"))
                return
            with unseen():
                canonical = tuple(map(call.per_token, routing))
            self.show(ref, canonical)

        return hook

    def reads_attention(self) -> bool:
        """Whether attention was selected."""
        return self._selection.wants_attention

    def show(self, ref: SiteRef, x: Observed) -> None:
        """Pass what a site shows on to the observer."""
        with unseen():
            self._observe(ref, x)

    def on_fused(self, ref: SiteRef, args: Sequence[Any], kwargs: Mapping[str, Any], perform: Perform) -> Any:
        """Show fused attention, and its output."""
        named = sdpa_arguments(args, kwargs)
        shown = ref in self._selection
        watch = watching_kernel(named["query"], named["key"]) if shown else nullcontext()
        with listening() as heard, watch as told:
            out = perform(*args, **kwargs)
        seen = heard[-1] if heard else from_sdpa(args, kwargs, None if told is None else log_sums_in(told.graph))
        if seen is not None:
            for site in self._asked(ref):
                self.show(site, seen)
        mixed = replace(ref, site=ref.site.replace(".probs", ".mixed"))
        if mixed in self._selection:
            self.show(mixed, out)
        return out

    def on_flex(self, ref: SiteRef, args: Sequence[Any], kwargs: Mapping[str, Any], perform: Perform) -> Any:
        """Show ``flex_attention``, and its output."""
        out = perform(*args, **kwargs)
        mixed = replace(ref, site=ref.site.replace(".probs", ".mixed"))
        if asked := self._asked(ref):
            with observing():  # the operator needs function modes of its own, so that it cannot run unseen
                seen = from_flex(perform, args, kwargs)
            for site in asked:
                self.show(site, seen)
        if mixed in self._selection:
            self.show(mixed, out[0])
        return out

    def on_softmax(self, ref: SiteRef, args: Sequence[Any], kwargs: Mapping[str, Any], perform: Perform) -> Any:
        """Show attention at its softmax."""
        out = perform(*args, **kwargs)
        assert self._open is not None
        seen = from_softmax(out, self._open.batch_and_tokens()[1], args[0])
        for site in self._asked(ref):
            self.show(site, seen)
        return out

    def _asked(self, ref: SiteRef) -> list[SiteRef]:
        """The selected sites that show this attention call; ``ref`` is that of its probabilities."""
        sites = (replace(ref, site=ref.site.replace(".probs", f".{end}")) for end in ATTENTION_ENDS)
        return [site for site in sites if site in self._selection]

    def on_enter(self, call: ActiveBlock, entry: Tensor) -> None:
        """Show the stream as it enters a block; keep a copy if its change is wanted."""
        super().on_enter(call, entry)
        if call.ref("block.update") in self._selection and call.stack.stream.takes == "stream":
            # A copy, because a model may add its branches to this tensor in place; fresh memory would cost more.
            with unseen():
                stream = call.canonical(entry).detach()
                if self._room is None or self._room.shape != stream.shape or self._room.dtype != stream.dtype:
                    self._room = torch.empty_like(stream)
                call.entered = self._room.copy_(stream)
        if self._selection.wants("mlp.branch") and call.stack.stream.takes == "stream":
            if self._inputs is None:
                self._inputs = BranchInputs()
                self._following.enter_context(self._inputs)
            self._inputs.begin(entry)

    def on_next_block(self, call: ActiveBlock, stream: Tensor) -> None:
        """Show the stream between two blocks of one call."""
        super().on_next_block(call, stream)
        self._show_change(call, stream)

    def on_add(
        self, call: ActiveBlock, label: Label | None, stream: Tensor, branch: Tensor, perform: Perform
    ) -> Tensor:
        """Show stream and branch, before an add in place overwrites one of them."""
        if label is not None and (ref := call.ref(f"{label}.update")) in self._selection:
            self.show(ref, (call.canonical(stream), call.canonical(branch)))
        if label == "mlp" and self._inputs is not None and (ref := call.ref("mlp.branch")) in self._selection:
            read = self._inputs.read_by(branch, stream)
            if isinstance(read, Tensor):
                self.show(ref, (call.canonical(read), call.canonical(branch)))
            else:
                self.show(ref, Unreadable(f"the input of the MLP cannot be told, because {read}"))
        return super().on_add(call, label, stream, branch, perform)

    def _summed(self, call: ActiveBlock, total: Tensor, target: Tensor | None = None) -> Tensor:
        out = super()._summed(call, total, target)
        # The branch of a parallel block that is added next was made from the stream before this sum.
        if self._inputs is not None and not call.is_joined:
            self._inputs.begin(out)
        return out

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._inputs is not None:
            self._following.close()
            self._inputs = None
        call = self._open
        super()._leave(module, args, output)
        if call is not None and output is not None and self._states is not None:
            self._show_state(call, module, self._states)

    def _show_state(self, call: ActiveBlock, block: nn.Module, states: RecurrentStates) -> None:
        ref = call.ref("attention.state")
        if ref not in self._selection:
            return
        state = states.refused or states.after(block, call.batch_and_tokens()[0])
        if isinstance(state, str):
            self.show(ref, Unreadable(state))
        elif state is not None:
            self.show(ref, state)

    def on_leave(self, call: ActiveBlock, out: Tensor) -> None:
        """Show the stream as it leaves a block."""
        left = out if call.last_sum is None else call.last_sum
        self._show(call, "block.out", left)
        self._show_streams(call, "streams.out", left)
        self._show_change(call, left)
        if call.last_sum is not None:
            self._show(call, "final", out)

    def _end_pass(self, output: Any) -> None:
        self._room = None
        self._states = None
        super()._end_pass(output)

    def _show_change(self, call: ActiveBlock, left: Tensor) -> None:
        if call.entered is None:
            return
        with unseen():
            before, after = call.entered, call.canonical(left).detach()
        call.entered = None
        self.show(call.ref("block.update"), (before, after))

    def on_final(self, stack: Stack, x: Tensor, out: Tensor) -> Tensor:
        """Show the stream after the final norm."""
        ref = SiteRef(stack.name, stack.depth - 1, "final")
        if ref in self._selection:
            self.show(ref, stack.stream.canonical(out, sequences_in_pass()))
        return out
