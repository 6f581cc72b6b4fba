"""The handler of :mod:`rankscope.ext.paths.capture`: each add, norm and attention call of a pass becomes a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import UnsupportedConfigError
from rankscope.ext.paths.maps import IDENTITY, Chain, Gain, NormCall, departure, explain, frozen_norm, tolerance
from rankscope.ext.paths.network import FrozenBlock, FrozenHeads, FrozenStep, Origin, SeenAttention
from rankscope.models.heads import HeadWeights, head_weights
from rankscope.models.view import Label, ModelView, Stack
from rankscope.stream.block_call import ActiveBlock
from rankscope.stream.mode import AttentionPlace, Handler, Perform, reading_weights, unseen
from rankscope.stream.sites import SiteRef


def gains_of(ref: SiteRef, stream: Tensor, branch: Tensor, out: Tensor) -> tuple[float, bool]:
    """Gain on the stream, and whether the branch was added: ``out = gain * stream (+ branch)``.

    Surgery rewrites adds, so the gain is read off the result: the frozen network is the one that ran.

    Raises:
        UnsupportedConfigError: the sum is neither.
    """
    if torch.equal(out, branch):
        return 0.0, True
    if torch.equal(out, stream):
        return 1.0, bool(not branch.any())
    if torch.equal(out, stream + branch):
        return 1.0, True
    s, b, y = stream.double().flatten(), branch.double().flatten(), out.double().flatten()
    power = float(s @ s)
    for target, added in ((y - b, True), (y, False)):
        gain = float(s @ target) / power if power > 0 else 0.0
        if departure(gain * s + (y - target), y) <= tolerance(out.dtype):
            return (1.0 if abs(gain - 1.0) <= 8 * torch.finfo(out.dtype).eps else gain), added
    raise UnsupportedConfigError(f"{ref}: the sum is not the branch plus a multiple of the stream.")


def _given(out: Tensor, branch: Tensor, after: Chain, norms: Sequence[NormCall]) -> Tensor | None:
    """The output of the output projection: the branch, or the input of the norm after it; None if neither is known."""
    if after.is_identity:
        return branch
    for call in norms:
        if call.taken.shape == out.shape and departure(out, call.taken) <= tolerance(branch.dtype):
            return call.taken
    if all(isinstance(part, Gain) and isinstance(part.factor, float) for part in after.parts):
        return branch.double() / after.linear(torch.ones((), dtype=torch.float64))
    return None


def _readings(state: Tensor, norms: Sequence[NormCall], dtype: torch.dtype) -> Iterator[tuple[Tensor, Chain]]:
    """Possible inputs of attention: a norm of the stream, latest first, or the stream itself."""
    for number in reversed(range(len(norms))):
        before = explain(state, norms[number].given, norms[: number + 1], dtype)
        if before is not None and not before.is_identity:
            yield norms[number].given, before
    yield state, IDENTITY


def _constant(heads: FrozenHeads, shift: Tensor, before: Chain, after: Chain) -> Tensor | None:
    """What the branch adds to a zero stream; None if nothing."""
    entering = before.offset()
    total = shift
    if entering is not None:
        total = total + heads(entering.expand(shift.shape)[None])[0]
    total = after.linear(total)
    leaving = after.offset()
    total = total if leaving is None else total + leaving
    return total if bool(total.any()) else None


OnEntry = Callable[[str | None, Tensor], None]
OnBlock = Callable[[FrozenBlock], None]


class Recorder(Handler):
    """Turns each block into steps."""

    reads_attention = True

    def __init__(
        self,
        view: ModelView,
        config: Any,
        on_entry: OnEntry,
        on_block: OnBlock,
        dtype: torch.dtype | None,
        *,
        before: Tensor | None = None,
        keep_seen: bool = False,
    ) -> None:
        self._keep_seen = keep_seen
        self._config, self._on_entry, self._on_block = config, on_entry, on_block
        self._dtype, self._before = dtype, before
        self._modules = view.modules()
        self._weights: dict[str, HeadWeights] = {}
        self._last: dict[str | None, Tensor] = {}
        self._begin_block()

    def _begin_block(self) -> None:
        self._steps: list[FrozenStep] = []
        self._norms: list[NormCall] = []
        self._probs: Tensor | None = None
        self._parallel: Tensor | None = None

    def _arithmetic(self, x: Tensor) -> torch.dtype:
        if self._dtype is not None:
            return self._dtype
        return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32

    def enter(self, call: ActiveBlock, entry: Tensor) -> None:
        """A block begins with the output of the previous one."""
        name = call.call.module_name
        if name not in self._weights:
            with reading_weights():
                self._weights[name] = head_weights(self._modules[name], self._config)
        with unseen():
            self._enter_block(call, entry)

    def _enter_block(self, call: ActiveBlock, entry: Tensor) -> None:
        self._begin_block()
        x = call.canonical(entry).clone()
        self._state = x
        if call.layer == 0:
            self._on_entry(call.stack.name, x.to(self._arithmetic(x)))
        else:
            last = self._last.get(call.stack.name)
            if last is None:
                assert self._before is not None
                last = call.canonical(self._before).clone()
                self._on_entry(call.stack.name, last.to(self._arithmetic(last)))
            if not self._same_for_all(last, x):
                self._pass_on(call.ref("block.in"), last, x)

    def _same_for_all(self, before: Tensor, after: Tensor) -> bool:
        """Whether something independent of the stream, the same for each input, was added between two blocks."""
        gap = after - before
        # With at least two inputs: the same difference for all of them cannot come from the stream.
        if not bool(gap.any()) or gap.shape[0] < 2 or departure(before + gap[:1], after) > tolerance(after.dtype):
            return False
        self._steps.append(FrozenStep(source=gap.to(self._arithmetic(after))))
        return True

    def _pass_on(self, ref: SiteRef, before: Tensor, after: Tensor) -> None:
        dtype = self._arithmetic(after)
        chain = explain(before, after, self._norms, dtype)
        if chain is None:
            raise UnsupportedConfigError(
                f"{ref}: the stream is changed on its way here by something that is neither a norm nor a gain, so it "
                "is not a sum of paths. Only blocks made of skips, norms, attention and MLPs can be decomposed."
            )
        if not chain.is_identity:
            self._steps.append(FrozenStep(skip=chain, bias=_spread(chain.offset(), after.to(dtype))))

    def add(self, call: ActiveBlock, label: Label | None, stream: Tensor, branch: Tensor, perform: Perform) -> Tensor:
        """Turn an add into a step; the gain on the skip (surgery) is read off its result."""
        if call.sum is not None and call.sum.join is not None:
            raise UnsupportedConfigError(
                f"{call.ref('block.in')}: {call.call.module_name} reads its stream and a branch side by side, which is "
                "not a sum of paths. Only blocks made of skips, norms, attention and MLPs can be decomposed."
            )
        with unseen():
            s, b = call.canonical(stream).clone(), call.canonical(branch).clone()
        out: Tensor = perform()
        with unseen():
            self._note_add(call, label, s, b, call.canonical(out).clone())
        return out

    def _note_add(self, call: ActiveBlock, label: Label | None, s: Tensor, b: Tensor, y: Tensor) -> None:
        ref = call.ref(f"{label}.out" if label else "block.in")
        kept, added = gains_of(ref, s, b, y)
        # In a post-norm block the stream that is added to is a norm of the last sum: find that map.
        way = explain(self._state, s, self._norms, self._arithmetic(b))
        if way is None:
            raise UnsupportedConfigError(f"{ref}: the stream it is added to did not come from the block's by norms.")
        skip = None if kept == 0 else way if kept == 1 else way.then(Chain((Gain(kept),)))
        if not call.joins:
            self._read, self._read_norms = self._state, self._norms
        step = self._step(ref, label, skip, b) if added else FrozenStep(skip=skip)
        if step.seen is not None:
            step = replace(step, seen=replace(step.seen, summed=y) if self._keep_seen else None)
        bias = _spread(None if skip is None else skip.offset(), b.to(self._arithmetic(b)))
        self._steps.append(self._joined(ref, step) if call.joins else _with_bias(step, bias))
        self._state, self._norms, self._parallel = y, [], None

    def _joined(self, ref: SiteRef, step: FrozenStep) -> FrozenStep:
        """Add a parallel branch, which reads the same input as the previous branch, to the previous step."""
        before = self._steps.pop()
        plain = step.skip is not None and step.skip.is_identity
        both = (before.heads and step.heads) or (before.source is not None and step.source is not None)
        if not plain or both:
            raise UnsupportedConfigError(f"{ref}: parallel branches of one kind, or under skips of their own.")
        bias = step.bias if before.bias is None else before.bias if step.bias is None else before.bias + step.bias
        attends, adds = (step if step.heads else before), (step if step.source is not None else before)
        return replace(attends, skip=before.skip, bias=bias, source=adds.source, origin=adds.origin)

    def _step(self, ref: SiteRef, label: Label | None, skip: Chain | None, b: Tensor) -> FrozenStep:
        dtype = self._arithmetic(b)
        if label == "attention":
            return self._attention_step(ref, b, skip, dtype)
        if label == "both":  # the MLP that was observed is a source; the rest must be the heads
            if self._parallel is None:
                raise UnsupportedConfigError(f"{ref}: the MLP joins the attention branch in a way that was not seen.")
            rest = (b.double() - self._parallel.double()).to(b.dtype)
            step = self._attention_step(ref, rest, skip, dtype)
            return replace(step, source=self._parallel.to(dtype), origin="mlp")
        if label == "mixer":
            raise UnsupportedConfigError(f"{ref}: a token mixer that is not attention has no paths through heads.")
        origins: dict[Label | None, Origin] = {"mlp": "mlp", "cross_attention": "cross_attention"}
        return FrozenStep(skip=skip, source=b.to(dtype), origin=origins.get(label, "other"))

    def _attention_step(self, ref: SiteRef, branch: Tensor, skip: Chain | None, dtype: torch.dtype) -> FrozenStep:
        """Attention as a step: the norm before it, the maps after its heads, and its constant part.

        Raises:
            UnsupportedConfigError: the sum over heads is not what the model added.
        """
        assert self.mode.open is not None
        if self._probs is None:
            raise UnsupportedConfigError(f"{ref}: its attention probabilities were not seen.")
        weights, norms = self._weights[self.mode.open.call.module_name], self._read_norms
        heads = FrozenHeads.of(weights, self._probs, dtype)
        shift = heads.shift(weights)
        nearest = float("inf")
        for read, before in _readings(self._read, norms, dtype):
            out = heads(read.to(dtype)[None])[0] + shift
            after = explain(out.to(branch.dtype), branch, norms, dtype, exact=False)
            if after is not None:
                constant = _constant(heads, shift, before, after)
                seen = SeenAttention(read, _given(out, branch, after, norms), branch)
                return FrozenStep(skip=skip, heads=heads, before=before, after=after, bias=constant, seen=seen)
            nearest = min(nearest, departure(out, branch))
        raise UnsupportedConfigError(
            f"{ref}: the sum over heads departs from what the model adds by {nearest:.1e} of its norm, where "
            f"{tolerance(branch.dtype):.0e} was expected. Something stands between the heads and the stream that the "
            "family description does not contain; this block cannot be decomposed."
        )

    def attention(self, place: AttentionPlace) -> Any:
        """Read the probabilities, after surgery if any."""
        is_own = place.ref.site == "attention.probs"
        out, seen = place.run_and_read(reads=is_own)
        if seen is not None:
            with unseen():
                self._probs = seen.probs()
        return out

    def leave(self, call: ActiveBlock, module: nn.Module, output: Any, left: Tensor) -> None:
        """The block is complete."""
        with unseen():
            y = call.canonical(left).clone()
            self._pass_on(call.ref("block.out"), self._state, y)
            self._last[call.stack.name] = y
            self._on_block(FrozenBlock(call.stack.name, call.layer, tuple(self._steps), y))

    def final(self, stack: Stack, x: Tensor, out: Tensor) -> Tensor:
        """The norm after the last block."""
        with unseen():
            self._note_final(stack, stack.stream.canonical(x), stack.stream.canonical(out))
        return out

    def _note_final(self, stack: Stack, x: Tensor, out: Tensor) -> None:
        assert stack.final_norm is not None
        ref = SiteRef(stack.name, stack.depth - 1, "final")
        self._steps, self._norms = [], []
        self._pass_on(ref, self._last[stack.name], x)
        chain = frozen_norm(NormCall(self._modules[stack.final_norm], x, out), self._arithmetic(out))
        if chain is None:
            raise UnsupportedConfigError(f"{ref}: the final norm is not a map with one scale per token.")
        bias = _spread(chain.offset(), out.to(self._arithmetic(out)))
        steps = (*self._steps, FrozenStep(skip=chain, bias=bias))
        self._on_block(FrozenBlock(stack.name, stack.depth - 1, steps, out.clone(), is_final=True))

    def parallel_mlp(self, call: ActiveBlock, out: Tensor) -> Tensor:
        """Note what a parallel MLP returns."""
        if out.numel() == call.entry_shape.numel():
            with unseen():
                self._parallel = call.canonical(out).clone()
        return out

    def norm(self, call: ActiveBlock, norm: tuple[str, int], x: Tensor, out: Tensor, *, of_stream: bool) -> Tensor:
        """Note what a norm module takes and returns."""
        if norm[0] and out.shape[-1] == call.entry_shape[-1] and out.numel() == call.entry_shape.numel():
            with unseen():
                taken, given = call.canonical(x).clone(), call.canonical(out).clone()
            self._norms.append(NormCall(self._modules[norm[0]], taken, given))
        return out


def _spread(offset: Tensor | None, like: Tensor) -> Tensor | None:
    return None if offset is None else offset.to(like.dtype).expand(like.shape)


def _with_bias(step: FrozenStep, bias: Tensor | None) -> FrozenStep:
    """The step with the constants of its own skip added."""
    if bias is None:
        return step
    return replace(step, bias=bias if step.bias is None else step.bias + bias)
