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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.models.inputs import sequences_in_pass
from rankscope.models.view import Label, ModelView, Stack
from rankscope.pass_graph.ir import Graph
from rankscope.pass_graph.record import GraphRecorder
from rankscope.stream.attention_calls import AttentionCall, sdpa_arguments
from rankscope.stream.block_call import ActiveBlock
from rankscope.stream.branch_inputs import BranchInputs
from rankscope.stream.mode import AttentionPlace, Handler, Hooks, Perform, StreamMode, unseen
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
    with StreamMode(view, Tracer(selection, observe)).active():
        yield


class Tracer(Handler):
    """Shows the selected sites to an observer.

    Tensors are shown as ``batch tokens dim``, at sites of several streams as ``batch tokens streams dim``.

    Args:
        selection: the sites to show.
        observe: receives what they show.
    """

    def __init__(self, selection: SiteSelection, observe: Observer) -> None:
        self._selection = selection
        self._observe = observe
        self._routers: list[RouterWatch] = []
        self._room: Tensor | None = None
        self._inputs: BranchInputs | None = None
        self._states: RecurrentStates | None = None

    @property
    def reads_attention(self) -> bool:
        """Whether attention was selected."""
        return self._selection.wants_attention

    def show(self, ref: SiteRef, x: Observed) -> None:
        """Pass what a site shows on to the observer."""
        with unseen():
            self._observe(ref, x)

    def _show(self, call: ActiveBlock, site: str, x: Tensor) -> None:
        ref = call.ref(site)
        if ref in self._selection:
            self.show(ref, call.canonical(x))

    def _show_streams(self, call: ActiveBlock, site: str, x: Tensor) -> None:
        ref = call.ref(site)
        if call.stack.stream.has_streams and ref in self._selection:
            self.show(ref, call.apart(x))

    # The stream, from block to block and from sum to sum.

    def enter(self, call: ActiveBlock, entry: Tensor) -> None:
        """Show the stream as it enters a block; keep a copy if its change is wanted."""
        if call.stack.stream.takes != "stream":
            return
        self._show(call, "block.in", entry)
        self._show_streams(call, "streams.in", entry)
        if call.ref("block.update") in self._selection:
            # A copy, because a model may add its branches to this tensor in place; fresh memory would cost more.
            with unseen():
                stream = call.canonical(entry).detach()
                if self._room is None or self._room.shape != stream.shape or self._room.dtype != stream.dtype:
                    self._room = torch.empty_like(stream)
                call.entered = self._room.copy_(stream)
        if self._selection.wants("mlp.branch"):
            if self._inputs is None:
                self._inputs = self.mode.during_call.enter_context(BranchInputs())
                self.mode.during_call.callback(setattr, self, "_inputs", None)
            self._inputs.begin(entry)

    def next_block(self, call: ActiveBlock, stream: Tensor) -> None:
        """Show the stream between two blocks of one call."""
        self._show_out(call, stream)

    def add(self, call: ActiveBlock, label: Label | None, stream: Tensor, branch: Tensor, perform: Perform) -> Tensor:
        """Show stream and branch, before an add in place overwrites one of them."""
        if label is not None and (ref := call.ref(f"{label}.update")) in self._selection:
            self.show(ref, (call.canonical(stream), call.canonical(branch)))
        if label == "mlp" and self._inputs is not None and (ref := call.ref("mlp.branch")) in self._selection:
            read = self._inputs.read_by(branch, stream)
            if isinstance(read, Tensor):
                self.show(ref, (call.canonical(read), call.canonical(branch)))
            else:
                self.show(ref, Unreadable(f"the input of the MLP cannot be told, because {read}"))
        if label is not None:
            self._show(call, f"{label}.out", branch)
        total: Tensor = perform()
        return total

    def added(self, call: ActiveBlock, label: Label | None, total: Tensor) -> None:
        """Show the sum."""
        if label is not None:
            self._show(call, f"{label}.sum", total)
        # The branch of a parallel block that is added next was made from the stream before this sum.
        if self._inputs is not None and not call.is_joined:
            self._inputs.begin(total)

    def leave(self, call: ActiveBlock, module: nn.Module, output: Any, left: Tensor) -> None:
        """Show the stream as it leaves a block, and the state of a recurrent one."""
        self._show_out(call, left if call.last_sum is None else call.last_sum)
        if call.last_sum is not None:
            self._show(call, "final", left)
        ref = call.ref("attention.state")
        if self._states is not None and ref in self._selection:
            state = self._states.refused or self._states.after(module, call.batch_and_tokens()[0])
            if state is not None:
                self.show(ref, Unreadable(state) if isinstance(state, str) else state)

    def _show_out(self, call: ActiveBlock, left: Tensor) -> None:
        """Show the stream after a block, and how the block has changed it."""
        self._show(call, "block.out", left)
        self._show_streams(call, "streams.out", left)
        if call.entered is not None:
            with unseen():
                before, after = call.entered, call.canonical(left).detach()
            call.entered = None
            self.show(call.ref("block.update"), (before, after))

    def final(self, stack: Stack, x: Tensor, out: Tensor) -> Tensor:
        """Show the stream after the final norm."""
        ref = SiteRef(stack.name, stack.depth - 1, "final")
        if ref in self._selection:
            self.show(ref, stack.stream.canonical(out, sequences_in_pass()))
        return out

    def end_pass(self, *, is_complete: bool) -> None:
        """Keep nothing of a pass."""
        self._room = None
        self._states = None

    # Attention.

    def attention(self, place: AttentionPlace) -> Any:
        """Show attention, and its output."""
        site = place.ref.site.removesuffix("probs")
        asked = [ref for end in ATTENTION_ENDS if (ref := replace(place.ref, site=site + end)) in self._selection]
        watch: AbstractContextManager[GraphRecorder | None] = nullcontext()
        if place.kind == "fused" and place.ref in self._selection:
            named = sdpa_arguments(place.args, place.kwargs)
            watch = watching_kernel(named["query"], named["key"])
        with watch as told:
            out, seen = place.run_and_read(
                reads=bool(asked), log_sums=lambda: None if told is None else log_sums_in(told.graph)
            )
        if seen is not None:
            for ref in asked:
                self.show(ref, seen)
        # The output of a softmax is the probabilities themselves.
        mixed = replace(place.ref, site=f"{site}mixed")
        if place.kind != "softmax" and mixed in self._selection:
            self.show(mixed, out[0] if place.kind == "flex" else out)
        return out

    # Mixtures of experts, and the states of recurrent blocks.

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Show a softmax or a top-k to the innermost mixture, which is the one that runs."""
        out = super().call(func, args, kwargs)
        if self._routers and (func in TOP_K or func in SOFTMAXES):
            with unseen():
                self._routers[-1].see_call(func, args, kwargs, out)
        return out

    def hooks(self, modules: Mapping[str, nn.Module]) -> Hooks:
        """Ask for the states of recurrent blocks."""
        if self._selection.wants("attention.state"):
            yield self.mode.view.model.register_forward_pre_hook(self._ask_for_states, with_kwargs=True)

    def _ask_for_states(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._states = RecurrentStates(module, kwargs)
        return args, {**kwargs, **self._states.arguments}

    def hooks_in(self, block: nn.Module) -> Hooks:
        """Watch the mixtures of experts in a block."""
        mixtures = mixtures_in(block) if self._selection.wants("mlp.router") else []
        for mixture in mixtures:
            owner = block.get_submodule(mixture.owner)
            yield owner.register_forward_pre_hook(self._enter_mixture(mixture))
            for name in mixture.experts:
                yield block.get_submodule(name).register_forward_pre_hook(self._enter_experts, with_kwargs=True)
            yield owner.register_forward_hook(self._leave_mixture(alone=len(mixtures) == 1), always_call=True)

    def _enter_mixture(self, mixture: MixtureOfExperts) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            batch, tokens = (0, 0) if self.mode.open is None else self.mode.open.batch_and_tokens()
            self._routers.append(RouterWatch(mixture, batch * tokens))

        return hook

    def _enter_experts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._routers:
            self._routers[-1].see_experts(args, kwargs)

    def _leave_mixture(self, *, alone: bool) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            watch, call = self._routers.pop(), self.mode.open
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
