"""The mode used by :mod:`rankscope.ext.paths.capture`: each add, norm and attention call of a pass becomes a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import UnsupportedConfigError
from rankscope.ext.paths.maps import IDENTITY, Chain, Gain, NormCall, departure, explain, frozen_norm, tolerance
from rankscope.ext.paths.network import FrozenBlock, FrozenHeads, FrozenStep, Origin, SeenAttention
from rankscope.models.heads import HeadWeights, head_weights
from rankscope.models.view import Label, ModelView, Stack
from rankscope.stream.attention_calls import AttentionCall, from_flex, from_sdpa, from_softmax, listening
from rankscope.stream.frames import output_tensor
from rankscope.stream.mode import ActiveBlock, Perform, StreamMode, observing, reading_weights, unseen
from rankscope.stream.operators import is_norm
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


def attention_step(
    ref: SiteRef,
    weights: HeadWeights,
    probs: Tensor,
    state: Tensor,
    norms: Sequence[NormCall],
    branch: Tensor,
    skip: Chain | None,
    dtype: torch.dtype,
) -> FrozenStep:
    """Attention as a step: the norm before it, the maps after its heads, and its constant part.

    Raises:
        UnsupportedConfigError: the sum over heads is not what the model added.
    """
    heads = FrozenHeads.of(weights, probs, dtype)
    shift = heads.shift(weights)
    nearest = float("inf")
    for read, before in _readings(state, norms, dtype):
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


def parallel_step(
    ref: SiteRef,
    weights: HeadWeights,
    probs: Tensor,
    state: Tensor,
    norms: Sequence[NormCall],
    branch: Tensor,
    skip: Chain | None,
    dtype: torch.dtype,
    mlp: Tensor | None,
) -> FrozenStep:
    """Attention and MLP added at once: the observed MLP part is a source; the rest must be the heads."""
    if mlp is None:
        raise UnsupportedConfigError(f"{ref}: the MLP joins the attention branch in a way that was not seen.")
    rest = (branch.double() - mlp.double()).to(branch.dtype)
    step = attention_step(ref, weights, probs, state, norms, rest, skip, dtype)
    return replace(step, source=mlp.to(dtype), origin="mlp")


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


class Recorder(StreamMode):
    """Follows the stream and turns each block into steps."""

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
        super().__init__(view)
        self._keep_seen = keep_seen
        self._config, self._on_entry, self._on_block = config, on_entry, on_block
        self._dtype, self._before = dtype, before
        self._modules = view.modules()
        self._weights: dict[str, HeadWeights] = {}
        self._last: dict[str | None, Tensor] = {}
        self._begin_block()

    def reads_attention(self) -> bool:
        """True: every attention call becomes a step."""
        return True

    def _begin_block(self) -> None:
        self._steps: list[FrozenStep] = []
        self._norms: list[NormCall] = []
        self._probs: Tensor | None = None
        self._parallel: Tensor | None = None

    def _arithmetic(self, x: Tensor) -> torch.dtype:
        if self._dtype is not None:
            return self._dtype
        return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32

    def on_enter(self, call: ActiveBlock, entry: Tensor) -> None:
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

    def on_add(
        self, call: ActiveBlock, label: Label | None, stream: Tensor, branch: Tensor, perform: Perform
    ) -> Tensor:
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
        step = self._step(ref, label, way, skip, b) if added else FrozenStep(skip=skip)
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

    def _step(self, ref: SiteRef, label: Label | None, way: Chain, skip: Chain | None, b: Tensor) -> FrozenStep:
        dtype = self._arithmetic(b)
        if label in ("attention", "both"):
            weights = self._weights[self._call_name()]
            if self._probs is None:
                raise UnsupportedConfigError(f"{ref}: its attention probabilities were not seen.")
            if label == "attention":
                return attention_step(ref, weights, self._probs, self._read, self._read_norms, b, skip, dtype)
            return parallel_step(
                ref, weights, self._probs, self._read, self._read_norms, b, skip, dtype, self._parallel
            )
        if label == "mixer":
            raise UnsupportedConfigError(f"{ref}: a token mixer that is not attention has no paths through heads.")
        origins: dict[Label | None, Origin] = {"mlp": "mlp", "cross_attention": "cross_attention"}
        return FrozenStep(skip=skip, source=b.to(dtype), origin=origins.get(label, "other"))

    def _call_name(self) -> str:
        assert self._open is not None
        return self._open.call.module_name

    def on_fused(self, ref: SiteRef, args: Sequence[Any], kwargs: Mapping[str, Any], perform: Perform) -> Any:
        """Read the probabilities of the fused kernel, after surgery if any."""
        with listening() as heard:
            out = perform(*args, **kwargs)
        self._note_probs(ref, heard[-1] if heard else from_sdpa(args, kwargs))
        return out

    def on_flex(self, ref: SiteRef, args: Sequence[Any], kwargs: Mapping[str, Any], perform: Perform) -> Any:
        """Read the probabilities of ``flex_attention``."""
        out = perform(*args, **kwargs)
        with observing():
            self._note_probs(ref, from_flex(perform, args, kwargs))
        return out

    def on_softmax(self, ref: SiteRef, args: Sequence[Any], kwargs: Mapping[str, Any], perform: Perform) -> Any:
        """Read the probabilities of the model's own softmax."""
        out = perform(*args, **kwargs)
        assert self._open is not None
        self._note_probs(ref, from_softmax(out, self._open.batch_and_tokens()[1]))
        return out

    def _note_probs(self, ref: SiteRef, call: AttentionCall | None) -> None:
        if call is not None and ref.site == "attention.probs":
            with unseen():
                self._probs = call.probs()

    def on_leave(self, call: ActiveBlock, out: Tensor) -> None:
        """The block is complete."""
        with unseen():
            y = call.canonical(out).clone()
            self._pass_on(call.ref("block.out"), self._state, y)
            self._last[call.stack.name] = y
            self._on_block(FrozenBlock(call.stack.name, call.layer, tuple(self._steps), y))

    def on_final(self, stack: Stack, x: Tensor, out: Tensor) -> Tensor:
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

    def _hooks(self, modules: Mapping[str, nn.Module]) -> Iterator[torch.utils.hooks.RemovableHandle]:
        for stack in self.view.stacks:
            for plan in stack.plans:
                if plan.parallel_mlp is not None:
                    yield modules[plan.parallel_mlp].register_forward_hook(self._note_parallel)
        yield from super()._hooks(modules)

    def _inner_hooks(self, block: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        yield from super()._inner_hooks(block)
        for module in block.modules():
            if is_norm(module):
                yield module.register_forward_hook(self._note_norm)

    def _note_parallel(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        out = output_tensor(output)
        if self._open is not None and out is not None and out.numel() == self._open.entry_shape.numel():
            with unseen():
                self._parallel = self._open.canonical(out).clone()

    def _note_norm(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call, out = self._open, output_tensor(output)
        if call is None or out is None or not args:
            return
        if out.shape[-1] == call.entry_shape[-1] and out.numel() == call.entry_shape.numel():
            with unseen():
                taken, given = call.canonical(args[0]).clone(), call.canonical(out).clone()
            self._norms.append(NormCall(module, taken, given))


def _spread(offset: Tensor | None, like: Tensor) -> Tensor | None:
    return None if offset is None else offset.to(like.dtype).expand(like.shape)


def _with_bias(step: FrozenStep, bias: Tensor | None) -> FrozenStep:
    """The step with the constants of its own skip added."""
    if bias is None:
        return step
    return replace(step, bias=bias if step.bias is None else step.bias + bias)
