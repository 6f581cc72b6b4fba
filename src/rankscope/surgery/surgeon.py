"""What surgery does at each place of a running model: skip adds, norms and attention; no weight is changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope.errors import SiteError, UnsupportedOperationError
from rankscope.models.view import Label, ModelView, Stack
from rankscope.stream.attention_calls import announce, from_sdpa, sdpa_arguments
from rankscope.stream.block_call import ActiveBlock, in_backward
from rankscope.stream.frames import tensors_in, with_another
from rankscope.stream.mode import AttentionPlace, Handler, Hooks, Perform, observing
from rankscope.stream.operators import IN_PLACE_SUMS, MULTI_HEAD
from rankscope.stream.sites import SiteRef
from rankscope.stream.states import LongSum, States
from rankscope.surgery.attention_edits import (
    before_kernel,
    before_softmax,
    joint_mixture,
    mapped_scores,
    mixed_probs,
    run_mixed,
)
from rankscope.surgery.checkpointed import BackwardWatch, CheckpointedPart
from rankscope.surgery.eager_attention import PRODUCTS, EagerAttention, attended, given_values, spot_of
from rankscope.surgery.graft import ATTENTION_PLACES, Graft, Mixture, Place, Spot, at_place
from rankscope.surgery.operation import NormChoice, Operation


def normed(x: Tensor, out: Tensor, choice: NormChoice) -> Tensor:
    """The output of a norm of ``x`` under surgery; ``out`` is the output of the model's own norm.

    A zero token stays zero.
    """
    if choice == "keep":
        return out
    if choice == "identity":
        return x.clone()
    # The result does not depend on the scale of x, so dividing by a constant peak first keeps the squares in range.
    peak = x.detach().abs().amax(dim=-1, keepdim=True)
    x = x / peak.masked_fill(peak == 0, 1.0)
    squared = x.square().sum(dim=-1, keepdim=True)
    if choice == "rms":
        squared = squared / x.shape[-1]
    return x * squared.masked_fill(peak == 0, 1.0).rsqrt()


READERS: frozenset[Callable[..., Any]] = PRODUCTS | {
    F.linear, torch.addmm, torch.einsum, F.conv1d, MULTI_HEAD,
}  # fmt: skip
"""By which a branch reads the stream."""


class Surgeon(Handler):
    """Applies operations and grafts to the stream, in order.

    Args:
        view: the model and its structure.

    Attributes:
        view: the model and its structure.
        operations: the active operations; the list may grow and shrink while the mode is active.
        grafts: the active grafts, applied after the operations; this list may change too.
    """

    follows_repeats = True

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.operations: list[Operation] = []
        self.grafts: list[Graft] = []
        self._eager = EagerAttention(self.grafts)
        self._reads = 0
        """How often grafts have changed what a matrix product reads, since the last sum."""
        self._touched: set[tuple[str, int]] = set()
        """What was changed in the current call, and in which block."""
        self._states: dict[str | None, States] = {}
        self._before: list[weakref.ref[Tensor]] = []
        self._long_skips_met: dict[str | None, int] = {}
        self._with_long_skips = sum(bool(stack.long_skips) for stack in view.stacks)
        self._backward = BackwardWatch(lambda: (*self.operations, *self.grafts))
        self._checkpoint = CheckpointedPart(self._running_again)
        self._has_run = False

    @property
    def reads_attention(self) -> bool:
        """True while an operation or a graft changes attention."""
        return self._changes_attention() or any(operation.touches_attention for operation in self.operations)

    def _changes_attention(self) -> bool:
        return any(graft.touches & ATTENTION_PLACES for graft in self.grafts)

    def _reset_grafts(self) -> None:
        self._eager.reset()
        for graft in self.grafts:
            graft.reset()

    def _for(self, stack: str | None, layer: int) -> list[Operation]:
        return [operation for operation in self.operations if operation.applies_to(stack, layer)]

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Scale long skips, which may lie between blocks, and let grafts see what blocks read."""
        if self.mode.open is not None:
            self._checkpoint.follow(self.mode.open, self._scales_long_skips())
        if self.mode.in_pass and self._scales_long_skips():
            return self._between_states(func, args, kwargs)
        return self._with_grafts(func, args, kwargs)

    def _between_states(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one call of a model with long skips, inside or outside of blocks, with the gain on the earlier state."""
        long_sums = {name: states.long_sum(func, args, kwargs) for name, states in self._states.items()}
        given, named = args, kwargs
        for name, long_sum in long_sums.items():
            if long_sum is not None:
                gain = self._long_gain(name, long_sum)
                if gain != 1.0:
                    scaled = gain * long_sum.carried if gain else torch.zeros_like(long_sum.carried)
                    given, named = (
                        with_another(given, long_sum.carried, scaled),
                        with_another(named, long_sum.carried, scaled),
                    )
        out = self._with_grafts(func, given, named)
        # For old += x the result must end up in the memory of old, which was scaled in a copy.
        if func in IN_PLACE_SUMS and given[0] is not args[0]:
            out = args[0].copy_(out)
        for name, states in self._states.items():
            states.see(func, args, kwargs, out, long_sums[name])
        if len(self._states) < self._with_long_skips:
            self._before += map(weakref.ref, tensors_in(out))
        return out

    def _scales_long_skips(self) -> bool:
        return self._with_long_skips > 0 and any(operation.attention_skip != 1.0 for operation in self.operations)

    def _long_gain(self, name: str | None, found: LongSum) -> float:
        stack = next(stack for stack in self.view.stacks if stack.name == name)
        met = self._long_skips_met.get(name, 0)
        self._long_skips_met[name] = met + 1
        planned = stack.long_skips[met : met + 1]
        if [(skip.first, skip.last) for skip in planned] != [(found.first, found.last)]:
            raise SiteError(
                f"A long skip goes around blocks {found.first} to {found.last}, and not where it did when the model "
                "was probed. The model takes another path on this input: use inputs of the same kind."
            )
        # Both ends are meant, or neither: an operation on some of the blocks in between was refused.
        return prod(operation.attention_skip for operation in self._for(name, found.first))

    def _check_long_skips(self, stack: Stack, calls_begun: int) -> None:
        """Raise unless every long skip that comes before a block has been met: otherwise it ran unchanged."""
        expected = sum(skip.calls_begun < calls_begun for skip in stack.long_skips if skip.calls_begun is not None)
        met = self._long_skips_met.get(stack.name, 0)
        if met < expected:
            raise UnsupportedOperationError(
                f"The long skip around {stack.long_skips[met].where} was found when the model was probed and is not "
                "met in this pass, so that its gain cannot be changed. exact, and models that run blocks again in the "
                "backward pass (gradient checkpointing), replace the tensors by which it is recognised."
            )

    def _with_grafts(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        call = self.mode.open
        if call is None or not self.grafts:
            return super().call(func, args, kwargs)
        if func in READERS and self._at("reads"):
            args = self._read(call, args)
        return self._eager.run(call, func, args, lambda: super(Surgeon, self).call(func, args, kwargs))

    def _read(self, call: ActiveBlock, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of a matrix product, with the stream replaced by what the grafts return for it."""
        given = [*args]
        for place, value in enumerate(given):
            for graft in self._at("reads") if call.is_stream(value) else ():
                given[place] = graft.read(spot_of(call), given[place])
                self._reads += 1
        return tuple(given)

    def _at(self, place: Place) -> list[Graft]:
        return at_place(self.grafts, place)

    def add(self, call: ActiveBlock, label: Label | None, stream: Tensor, branch: Tensor, perform: Perform) -> Tensor:
        """Apply the gain to the skip, or drop the MLP."""
        assert call.sum is not None
        operations = self._for(call.stack.name, call.layer) if label is not None else []
        if label is None or not (operations or self.grafts):
            return super().add(call, label, stream, branch, perform)
        # A joining parallel branch is added to a sum that already contains the stream with its gain.
        gain = 1.0 if call.joins else prod(operation.gain(label) for operation in operations)
        dtype = torch.result_type(stream, branch)
        # Dropping an MLP under a removed skip would leave zeros: the stream is passed on instead, unless another
        # parallel branch is still to come.
        if label == "mlp" and any(operation.mlp == "drop" for operation in operations):
            keeps_stream = gain == 1.0 or (gain == 0.0 and not call.is_joined)
            return call.sum.of(stream if keeps_stream else gain * stream, None, dtype)
        own, added = self._grafted(call, label, stream, branch)
        # If nothing changes, run the model's own add, so that the result is bit-identical.
        if gain == 1.0 and own is stream and added is branch:
            return super().add(call, label, stream, branch, perform)
        return call.sum.of(None if gain == 0.0 else own if gain == 1.0 else gain * own, added, dtype)

    def enter(self, call: ActiveBlock, entry: Tensor) -> None:
        """Start recording what is changed."""
        if self.mode.in_pass:
            self._backward.look()
        elif not self._has_run:
            raise UnsupportedOperationError(
                f"Gradient checkpointing runs {call.call.module_name} again in this backward pass, and the forward "
                "pass ran without the surgery that is active now. Call backward() before the `with` block begins."
            )
        if call.block == 0:
            self._touched.clear()
        if call.stack.long_skips and call.block == 0 and self._scales_long_skips():
            if not self.mode.in_pass:
                self._long_skips_met.clear()  # in the backward pass, whatever lies between blocks runs unseen
            self._check_long_skips(call.stack, call.number + 1 if self.mode.in_pass else len(call.stack.calls) + 1)
            if call.stack.name not in self._states:
                self._states[call.stack.name] = States(entry, self._before)
            states = self._states[call.stack.name]
            if states.number_of(entry) is None:
                states.reach(entry, call.call.first_layer)

    def _grafted(self, call: ActiveBlock, label: Label, stream: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """The stream and the branch to add; a joining parallel branch finds the stream already past the first add."""
        if self._at("reads") and not self._reads:
            raise UnsupportedOperationError(
                f"Block {call.layer}: the matrix product by which its {label} branch reads the stream was not seen, so "
                "what it reads cannot be changed."
            )
        self._reads = 0
        for graft in self._at("adds"):
            own, branch = graft.add(spot_of(call), label, stream, branch)
            stream = stream if call.joins else own
        return stream, branch

    def norm(self, call: ActiveBlock, norm: tuple[str, int], x: Tensor, out: Tensor, *, of_stream: bool) -> Tensor:
        """Replace a norm of the stream, or another one if it is the block's own and not a part of a branch."""
        if of_stream:
            out = self._normed(call, x, out)
            for graft in self._at("norms") if not call.is_at_final_norm else ():
                out = graft.norm(spot_of(call), x, out, is_last=call.adds_are_over)
            return out
        choice, parts = self._norm_choice(call), call.call.parts
        if choice == "keep":
            return out
        if parts is not None and norm in parts.norms:
            return self._normed(call, x, out)
        around = [carry for carry in call.stack.carries if carry.first <= call.layer <= carry.last]
        is_known = parts is not None and norm in parts.inner
        if not is_known or any(carry.calls_begun is None for carry in around):
            raise UnsupportedOperationError(
                f"norm={choice!r}: block {call.layer} ({call.call.module_name}) has a norm of which it cannot be told "
                f"whether it reads the stream or is a part of a branch: {norm[0] or 'a norm function'}. It was not met "
                "when the model was probed, or not all of the block's sums are known. Write them as x + f(x), give "
                "inputs of the same kind, or leave norm= out."
            )
        return out

    def _normed(self, call: ActiveBlock, x: Tensor, out: Tensor) -> Tensor:
        choice = self._norm_choice(call)
        if choice == "keep":
            return out
        if out.shape[-1] != call.entry_shape[-1]:
            raise UnsupportedOperationError(
                f"norm={choice!r}: block {call.layer} ({call.call.module_name}) normalises a tensor of shape "
                f"{tuple(out.shape)}, where its stream has {tuple(call.entry_shape)}: a norm over another width or "
                "another axis cannot be replaced."
            )
        self._touched.add(("norm", call.layer))
        return normed(x, out, choice)

    def _norm_choice(self, call: ActiveBlock) -> NormChoice:
        if call.is_at_final_norm:
            return "keep"
        chosen = [operation.norm for operation in self._for(call.stack.name, call.layer) if operation.norm != "keep"]
        return chosen[-1] if chosen else "keep"

    def _on_attention(self, ref: SiteRef) -> list[Operation]:
        """The operations on this attention; masks are between tokens of one stream and skip cross-attention."""
        operations = self._for(ref.stack, ref.layer)
        if ref.site == "cross_attention.probs":
            operations = [replace(operation, mask=None) for operation in operations]
        return [operation for operation in operations if operation.touches_attention]

    def _spot(self, ref: SiteRef) -> Spot | None:
        """The block of this attention, for grafts; None for cross-attention, which they do not change."""
        assert self.mode.open is not None
        if ref.site != "attention.probs" or not self._changes_attention():
            return None
        return Spot(ref.stack, ref.layer, self.mode.open.stack.depth)

    def attention(self, place: AttentionPlace) -> Any:
        """Change attention before its softmax and after it."""
        operations, spot = self._on_attention(place.ref), self._spot(place.ref)
        if not (operations or spot):
            return place.run()
        if place.kind == "flex":
            raise UnsupportedOperationError(
                f"{place.ref}: flex_attention computes its scores inside an operator, where they cannot be changed. "
                "Skips, norms and MLPs can. To change attention, use scaled_dot_product_attention in the model "
                "(attn_implementation='sdpa')."
            )
        edited = self._fused if place.kind == "fused" else self._softmax
        return edited(place, operations, spot)

    def _fused(self, place: AttentionPlace, operations: Sequence[Operation], spot: Spot | None) -> Any:
        """Run the fused kernel on modified arguments, and edit its output."""
        own, named = from_sdpa(place.args, place.kwargs), sdpa_arguments(place.args, place.kwargs)
        assert own is not None
        # Two stages: arguments before the kernel, and edits of P expressed on P V.
        call = before_kernel(own, place.tokens, operations)
        if spot is not None:
            call = replace(call, value=given_values(self.grafts, spot, named["value"]))
            call = mapped_scores(own, call, spot, self._at("queries"))
        assert call.query is not None
        assert call.value is not None
        mixture = joint_mixture(operations, self._mixtures(spot), call.query)
        out = run_mixed(call, named, place.perform, mixture)
        # The tracer sees the model's arguments, not these: tell it which attention really ran.
        announce(call if mixture is None else replace(call, edit=partial(mixed_probs, mixture=mixture)))
        return out if spot is None else attended(self.grafts, spot, out, call.value)

    def _mixtures(self, spot: Spot | None) -> list[Mixture]:
        return [] if spot is None else [graft.mixture(spot) for graft in self._at("probs")]

    def _softmax(self, place: AttentionPlace, operations: Sequence[Operation], spot: Spot | None) -> Any:
        """Change scores before the softmax and probabilities after it."""
        given, *rest = place.args
        mixture = joint_mixture(operations, self._mixtures(spot), given)
        sinks = int(place.ref.site == "attention.probs" and given.shape[-1] == place.tokens + 1)
        flat = any(operation.attention != "keep" or operation.attention_scale != 1.0 for operation in operations)
        if sinks and (flat or self._changes_attention()):
            what = "uniform has no meaning" if flat else "a change of queries, probabilities or values is not defined"
            raise UnsupportedOperationError(f"{place.ref}: a learned sink stands beside its keys: {what} there.")
        scores, visible = before_softmax(given, place.tokens, operations, sinks)
        if spot is not None:
            self._eager.before_softmax(spot)
        # A softmax over a row of -inf is NaN. Rows that see nothing get equal scores first and zeros afterwards.
        sees_nothing = ~visible.any(dim=-1, keepdim=True)
        probs = place.perform(scores.masked_fill(sees_nothing, 0.0), *rest, **place.kwargs)
        probs = probs.masked_fill(sees_nothing, 0.0)
        return probs if mixture is None else mixed_probs(probs, visible, mixture)

    def added(self, call: ActiveBlock, label: Label | None, total: Tensor) -> None:
        """Follow the state of a model with long skips."""
        if call.stack.name in self._states:
            self._states[call.stack.name].reach(total, call.layer)

    def leave(self, call: ActiveBlock, module: nn.Module, output: Any, left: Tensor) -> None:
        """Check that every requested change was made."""
        self._eager.check_values()
        if call.stack.name in self._states:
            self._states[call.stack.name].reach(left, call.call.first_layer + len(call.call.blocks))
        for block, plan in enumerate(call.call.blocks):
            layer = call.call.first_layer + block
            for operation in self._for(call.stack.name, layer):
                if operation.norm != "keep" and plan.has_norm and len(call.call.blocks) == 1:
                    self._check_touched("norm", f"norm={operation.norm!r}", call, layer)
                if operation.mlp == "drop" and "both" in plan.skips:
                    self._check_touched("mlp", "mlp='drop'", call, layer)
        if self.mode.in_pass:
            self._backward.see_output(output)

    def _check_touched(self, what: str, asked: str, call: ActiveBlock, layer: int) -> None:
        if (what, layer) not in self._touched:
            raise UnsupportedOperationError(
                f"{asked} changed nothing in block {layer} ({call.call.module_name}): the {what} that was seen there "
                "when the model was probed was not met in this pass."
            )

    def begin_pass(self) -> None:
        """Forget the pass before."""
        self._has_run = True
        self._backward.begin_pass()
        self._states.clear()
        self._before.clear()
        self._long_skips_met.clear()
        self._reset_grafts()

    def end_pass(self, *, is_complete: bool) -> None:
        """Keep nothing of the pass, and check that every long skip was scaled."""
        self._reset_grafts()
        self._states.clear()
        for stack in self.view.stacks if is_complete and self._scales_long_skips() else ():
            self._check_long_skips(stack, len(stack.calls) + 1)

    def hooks_in(self, block: nn.Module) -> Hooks:
        """Let grafts see what torch's own attention reads, and refuse parts that are checkpointed by themselves."""
        for module in block.modules():
            if isinstance(module, nn.MultiheadAttention):
                yield module.register_forward_pre_hook(self._read_whole)
            # Checkpointing a part of a block repeats it without opening the block, so it would run unmodified.
            if module is not block:
                yield module.register_forward_pre_hook(self._refuse_parts)

    def _read_whole(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Torch's own attention transposes its inputs before its opaque product, so it is handled as a whole."""
        call = self.mode.open
        if call is None or not self._at("reads"):
            return None
        with observing():
            return self._read(call, args)

    @contextmanager
    def _running_again(self, call: ActiveBlock) -> Iterator[None]:
        """Modify a part of a block that runs once more in the backward pass."""
        before, self.mode.open = self.mode.open, call
        try:
            with self.mode.re_enabled():
                yield
        finally:
            self.mode.open = before

    def _refuse_parts(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.mode.open is not None and self.mode.in_pass:
            self._backward.look()
        if self.mode.open is None and in_backward():
            raise UnsupportedOperationError(
                f"Gradient checkpointing runs {type(module).__name__}, a part of a block, again by itself in the "
                "backward pass, and there it cannot be told which block is meant. Checkpoint with use_reentrant=False, "
                "or whole blocks."
            )

    def parallel_mlp(self, call: ActiveBlock, out: Tensor) -> Tensor:
        """Drop an MLP that joins the attention branch."""
        if not any(operation.mlp == "drop" for operation in self._for(call.stack.name, call.layer)):
            return out
        self._touched.add(("mlp", call.layer))
        return torch.zeros_like(out)
