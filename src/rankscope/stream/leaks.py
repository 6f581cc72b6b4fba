"""Proves that the known skips are the only way around the branches of a block.

A sum can be written in more ways than any list of operations has: a pooled stack, an FFT, a copy through NumPy. So the
model runs with everything held fixed that passes through a matrix of weights, and with every known skip removed. Each
known sum begins anew with a fixed stream. Compared with such a pass, others change

- the stream, before the last known sum of a block. If that reaches the output of the block, the stream gets around a
  known sum.
- what comes out of those matrices that the stream reached. If that reaches the stream where a known sum takes it, it
  was added there by a sum that is not known. After the last known sum, the same holds for the output of the block,
  provided that the stream reaches it as well: without that, the block has no skip there. If the stream reaches both a
  matrix and the output there, that is enough: what the matrix does may be hidden, as in a gradient of an energy.
- the stream after every other sum, where branches are added to each other first. If that reaches a parallel branch, it
  was not computed beside the one before it.

A branch without a matrix, as a sine of each entry, is not held fixed. Where the stream reaches a branch, or goes on
behind the last known sum through operations that are not known, further passes multiply the stream of all tokens or of
some, or choose tokens for which a norm is linear. A branch must not grow in proportion, or it contains the stream. What
follows the last sum must be a norm of each token or act on each entry in proportion, or it may hide a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator

from rankscope.errors import SiteError
from rankscope.linalg.precision import as_float64, float64_home
from rankscope.linalg.rounding import differs
from rankscope.models.inputs import sequences_in_pass
from rankscope.models.linear_maps import is_packed_linear
from rankscope.models.loading.devices import seed_generators
from rankscope.models.view import Carry, Label, ModelView, Stack
from rankscope.models.wrapping import hidden
from rankscope.stream.frames import ByTensor, first_tensor, output_tensor, tensors_in, with_another, with_output_tensor
from rankscope.stream.mode import ActiveBlock, Perform, StreamMode
from rankscope.stream.operators import (
    ADDED_MATRIX_PRODUCTS,
    DIVISIONS,
    JOINS,
    MOVES,
    MULTI_HEAD,
    MULTIPLICATIONS,
    NORMS,
    PRODUCTS,
    QUERIES,
    SDPA,
    SUMS,
    is_flex,
)

_GAINS = MULTIPLICATIONS | DIVISIONS
_ELEMENTWISE = SUMS | MULTIPLICATIONS | DIVISIONS | MOVES | NORMS | JOINS
_Place = tuple[str | None, int]
_Change = Literal["nothing", "early", "late", "weights", "even", "odd", "none", "some", "far", "plus", "minus"]
"""What a pass changes: the stream before the last known sum, the stream after it, what weights return after it, the
stream at every other of its beginnings, its size, or its tokens."""
_FAR = 2.0**16
_SIZES: Mapping[_Change, tuple[float, float]] = {
    "none": (0.0, 1.0),
    "some": (1.0, 2.0),
    "far": (_FAR, 1.0),
    "plus": (_FAR, 1.0),
    "minus": (-_FAR, 1.0),
}
"""Factors on the stream of all tokens, and on that of every other token once more."""
_GROWS = 2.0**-10
"""A branch whose entries are larger than this, divided by the factor on the stream, grows in proportion to it."""
_MOST = 0.75
"""Share of a branch that has to grow: of an activation, as ReLU, half of the entries do."""
_ROUNDINGS = 64
_STREAM, _WEIGHTS = 1, 2
"""Where a tensor comes from without weights in between, as bits."""


def with_leaks(view: ModelView, run: Callable[[], object]) -> ModelView:
    """The view, with a carry for each block around whose branches the stream gets in an unknown way."""
    if not all(stack.stream.has_plain_blocks for stack in view.stacks):
        return view
    kept = _Kept()
    reference = _run(_Held(view, kept, "nothing"), run)

    def passed(change: _Change, only: _Place | None = None) -> _Held:
        return _run(_Held(view, kept, change, only), run)

    def leaks_of(only: _Place | None = None) -> set[_Place]:
        early = passed("early", only)
        weights_then, late = reference.opaque, set()
        if reference.weights_at_end or reference.unfollowed:
            behind = passed("late", only)
            weights_then, late = reference.opaque | behind.weights_reached, behind.changed
        weights = passed("weights", only)
        leaks = early.changed | weights.added | (late & (weights.changed | weights_then))
        return leaks | _beside_weights(passed, kept, early.reached, (late & reference.unfollowed) - leaks)

    leaks = leaks_of()
    if any(stack.long_skips for stack in view.stacks):
        # A long skip brings the changed stream of one block to another, so each is changed alone.
        leaks = {place for place in leaks if place in leaks_of(place)}
    if any(any(plan.joins) for stack in view.stacks for plan in stack.plans):
        leaks |= passed("even").late_joins | passed("odd").late_joins
    return replace(view, stacks=tuple(_with(stack, leaks, reference) for stack in view.stacks))


def _beside_weights(
    passed: Callable[[_Change], _Held], kept: _Kept, branches: set[_Branch], ends: set[_Place]
) -> set[_Place]:
    """The block calls among these in which a branch contains the stream, or in which a sum may follow the last one.

    Args:
        passed: runs the model with a change.
        kept: values of the pass that changed nothing.
        branches: the branches that the stream reaches without passing through weights.
        ends: the calls whose output the stream reaches through operations that are not known.
    """
    if not branches and not ends:
        return set()
    far = passed("far").values if branches else {}
    places = {
        branch.place for branch in branches
        if branch not in far or float((far[branch].abs() > _GROWS * _FAR).double().mean()) > _MOST
    }  # fmt: skip
    if not ends:
        return places
    none, some, plus, minus = (passed(change) for change in ("none", "some", "plus", "minus"))
    for place in ends:
        values = [one.get(place) for one in (kept.tensors, none.values, some.values)]
        tokens = [one.tokens.get(place) for one in (plus, minus)]
        chosen = some.chosen.get(place)
        shapes = {value.shape for value in (*values, chosen) if value is not None}
        if chosen is None or None in values or None in tokens or len(shapes) > 1:
            places.add(place)
            continue
        plain, at_zero, doubled = (value for value in values if value is not None)
        in_proportion = torch.where(chosen, 2 * plain - at_zero, plain)
        if _unlike(doubled, in_proportion) and not _are_norms(*(value for value in tokens if value is not None)):
            places.add(place)
    return places


def _are_norms(plus: Tensor, minus: Tensor) -> bool:
    """Whether each row is a norm of its token, times weights and plus a bias.

    The tokens are those of :func:`_normed_tokens` and their negatives, so that a norm leaves them as they are, but for
    a factor that all have.
    """
    bias, weighted = (plus + minus) / 2, (plus - minus) / 2
    whole = len(plus) // 3 * 3
    one, other, both = (weighted[first:whole:3] for first in range(3))
    size = plus.abs().max()
    limit = _ROUNDINGS * torch.finfo(plus.dtype).eps * size
    return whole > 0 and bool(
        ((bias - bias[:1]).abs() <= limit).all() and (((one + other) * 0.5**0.5 - both).abs() <= limit).all()
    )


def _run(mode: _Held, run: Callable[[], object]) -> _Held:
    with torch.random.fork_rng(devices=[]), torch.no_grad(), mode.active():
        with hidden():
            seed_generators(0)
        run()
    return mode


def _with(stack: Stack, leaks: set[_Place], reference: _Held) -> Stack:
    names = reference.combined | reference.met
    leaking = []
    for number, call in enumerate(stack.calls):
        last = call.first_layer + len(call.blocks) - 1
        uncut = (carry for carry in stack.carries if carry.calls_begun is None)
        known = any(carry.first <= last and carry.last >= call.first_layer for carry in uncut)
        if (stack.name, number) in leaks and not known:
            operation = names.get((stack.name, number), "an operation that cannot be followed")
            leaking.append(Carry(call.module_name, operation, call.first_layer, last))
    renamed = [_first_met(stack, carry, reference) for carry in stack.carries]
    return replace(stack, carries=(*renamed, *leaking), cuts_proven=True)


def _first_met(stack: Stack, carry: Carry, reference: _Held) -> Carry:
    """A carry of one block, named after the first unknown sum in it: what follows only passes that on."""
    places = [(stack.name, number) for number, call in enumerate(stack.calls) if call.module_name == carry.module]
    alone = sum(other.module == carry.module for other in stack.carries) == 1
    if not alone or len(places) != 1 or carry.calls_begun is not None:
        return carry
    return replace(carry, operation=reference.met.get(places[0], carry.operation))


class _Branch(NamedTuple):
    """What is added in a block call, by the number of adds until then."""

    place: _Place
    add: int


@dataclass
class _Kept:
    """What passes are compared by.

    Attributes:
        tensors: outputs of block calls, and the stream where a known sum takes it, from the pass that changes nothing.
        sums: one number for what each product with weights was given in that pass.
        reached: the products to which the stream is given, directly or changed.
    """

    tensors: dict[Hashable, Tensor] = field(default_factory=dict)
    sums: dict[Hashable, float] = field(default_factory=dict)
    reached: set[Hashable] = field(default_factory=set)


class _Held(StreamMode):
    """Runs blocks with fixed numbers in place of what passes through weights, and of the stream.

    Args:
        view: the model and its structure.
        kept: what this pass is compared by.
        change: what it changes.
        only: the only block call in which it changes that; None for all.

    Attributes:
        changed: block calls whose output differs from that of the pass that changed nothing.
        added: those in which what passed through weights became part of the stream before a known sum.
        weights_at_end: those in which a matrix of weights is used after the last known sum.
        weights_reached: those in which the stream reaches such a matrix, compared with the pass that changed nothing.
        opaque: those in which an operator that takes functions runs after the last known sum: it may add what it was
            given to what its functions compute.
        combined: the last operation of each call that may be a sum, as its author wrote it.
        met: the first one in which the stream meets what passed through weights, and that is not a known sum.
        unfollowed: those whose output is not known to be the stream, or a norm of it, or whose stream was returned by
            an operation that is not known.
        reached: branches that differ from those of the pass that changed nothing.
        late_joins: calls with a branch that is taken to be parallel to the one before it and depends on its sum.
        values: outputs of block calls, and branches.
        tokens: the same outputs, a row for each token.
        chosen: which entries of the output of a call belong to the tokens that are changed once more.
    """

    def __init__(self, view: ModelView, kept: _Kept, change: _Change, only: _Place | None = None) -> None:
        super().__init__(view)
        self.changed: set[_Place] = set()
        self.added: set[_Place] = set()
        self._products = Counter[_Place]()
        self.weights_at_end: set[_Place] = set()
        self.weights_reached: set[_Place] = set()
        self.opaque: set[_Place] = set()
        self.combined: dict[_Place, str] = {}
        self.met: dict[_Place, str] = {}
        self.unfollowed: set[_Place] = set()
        self.reached: set[_Branch] = set()
        self.late_joins: set[_Place] = set()
        self.values: dict[Hashable, Tensor] = {}
        self.tokens: dict[_Place, Tensor] = {}
        self.chosen: dict[_Place, Tensor] = {}
        self._beginnings = Counter[_Place]()
        self._origins = ByTensor[int]()
        self._kept, self._change, self._only = kept, change, only
        self._weights = ByTensor[None]()
        for parameter in view.model.parameters():
            if parameter.dim() > 1:
                self._weights[parameter] = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in QUERIES:
            return func(*args, **(kwargs or {}))
        given = tensors_in((args, kwargs or {}), depth=3)
        weights = [tensor for tensor in given if tensor in self._weights]
        call = self._open
        if weights and len(weights) == len(given):
            out = func(*args, **(kwargs or {}))
            for tensor in tensors_in(out):
                self._weights[tensor] = None  # a part or a turn of a matrix is still one
            return out
        ungated = _ungated(call, given) if func in _GAINS else None
        sums = 0 if call is None else call.adds_seen
        out = super().__torch_function__(func, types, args, kwargs)
        if call is None:
            return out
        if call.is_stream(out) and func not in _ELEMENTWISE:
            self.unfollowed.add(_place(call))  # as one that writes to the stream in place
        if call.is_stream(out) and func not in SUMS:
            # What weights do to a stream that is still followed is a gain on it, or a known sum of what lies side by
            # side. Behind the last known sum, no skip has that gain: there it counts as any other product.
            if ungated is not None and not _is_last(call):
                with torch._C.DisableTorchFunction():
                    out.copy_(ungated)
        elif func == MULTI_HEAD or (weights and _is_product(func, args)):
            return self._fixed(call, out, [tensor for tensor in given if tensor not in self._weights])
        if isinstance(func, HigherOrderOperator) and not is_flex(func) and _is_last(call):
            self.weights_at_end.add(_place(call))
            self.opaque.add(_place(call))
        if func not in MOVES and self._open is call and given and not _named(func).startswith("__"):
            self.combined[_place(call)] = _named(func)
        if call.adds_seen == sums or func in JOINS:
            self._pass_on(func, call, given, out)
        return out

    def _pass_on(self, func: Callable[..., Any], call: ActiveBlock, given: Sequence[Tensor], out: Any) -> None:
        """Note what an operation is given of the stream and of what passed through weights."""
        origin = 0
        for tensor in given:
            origin |= _STREAM if call.is_stream(tensor) else self._origins.get(tensor) or 0
        name = _named(func)
        if func in PRODUCTS or func is SDPA or is_flex(func):
            origin = _WEIGHTS if origin & _WEIGHTS else 0  # attention: no token of the stream goes on as it is
        is_sum = func not in MOVES and func not in JOINS and func not in NORMS and not name.startswith("__")
        if origin == _STREAM | _WEIGHTS and is_sum:
            self.met.setdefault(_place(call), name)
            origin = _STREAM
        for tensor in tensors_in(out) if origin else ():
            self._origins[tensor] = origin

    def _fixed(self, call: ActiveBlock, out: Any, given: Sequence[Tensor]) -> Any:
        """What passed through weights, replaced by fixed numbers."""
        if _is_last(call):
            self.weights_at_end.add(_place(call))
        with torch._C.DisableTorchFunction():
            is_reached = self._is_reached(_place(call), given)
            if is_reached and _is_last(call):
                self.weights_reached.add(_place(call))
            changes = is_reached and self._changes_weights(_place(call))
            for tensor in tensors_in(out):
                self._origins[tensor] = _WEIGHTS
                if tensor.is_floating_point():
                    tensor.copy_(_numbers(tensor, 2 if changes else 1))
        return out

    def _is_reached(self, place: _Place, given: Sequence[Tensor]) -> bool:
        """Whether what a product is given differs in this pass; where weights change, in any pass before."""
        number = self._products[place]
        self._products[place] += 1
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, given)):
            self._kept.reached.add((place, number))  # inside torch.func there are no numbers to compare
            return True
        total = sum(float(torch.nan_to_num(as_float64(x.detach())).flatten() @ _weights_of(x))
                    for x in given if x.is_floating_point())  # fmt: skip
        if self._change == "nothing":
            self._kept.sums[place, number] = total
        differs = self._kept.sums.get((place, number)) != total
        if differs and self._change not in ("even", "odd"):
            self._kept.reached.add((place, number))
        return (place, number) in self._kept.reached if self._change == "weights" else differs

    def _changes(self, what: _Change, place: _Place) -> bool:
        return self._change == what and self._only in (None, place)

    def _changes_weights(self, place: _Place) -> bool:
        return self._change in ("even", "odd") or self._changes("weights", place)

    def _stream(self, like: Tensor, stack: Stack, place: _Place, *, at_end: bool) -> Tensor:
        """Fixed numbers for the stream, others in the pass that changes it there."""
        parity: _Change = "odd" if self._beginnings[place] % 2 else "even"
        is_other = self._changes("late" if at_end else "early", place) or self._change == parity
        with torch._C.DisableTorchFunction():
            numbers = _numbers(like, 4 if is_other else 3)
            if self._change in ("plus", "minus"):
                numbers = _normed_tokens(like, stack)
            if self._change not in _SIZES:
                return numbers
            all_tokens, some_tokens = _SIZES[self._change]
            chosen = self.chosen[place] = _every_other_token(like, stack)
            return numbers * all_tokens * torch.where(chosen, some_tokens, 1.0).to(numbers)

    def on_add(
        self, call: ActiveBlock, label: Label | None, stream: Tensor, branch: Tensor, perform: Perform
    ) -> Tensor:
        """Remove the skip, and begin anew after it."""
        assert call.sum is not None
        if label is None:
            return super().on_add(call, label, stream, branch, perform)
        branch_of = _Branch(_place(call), call.adds_seen)
        if call.joins:
            parity = "odd" if self._beginnings[_place(call)] % 2 else "even"
            if self._differs(branch_of, branch) and self._change == parity:
                self.late_joins.add(_place(call))
            return call.sum.of(stream, None)
        # What mixes tokens may grow with them. Only from a sum that subtracts the stream, it has to be a part of it.
        if self._differs(branch_of, branch) and (label == "mlp" or _is_subtracted(stream, call.sum.carried)):
            self.reached.add(branch_of)
        if self._change in _SIZES:
            self.values[branch_of] = branch.detach().clone()
        if self._differs((*_place(call), call.adds_seen), call.sum.carried) and self._change == "weights":
            self.added.add(_place(call))
        self._beginnings[_place(call)] += 1
        return call.sum.of(None, self._stream(branch, call.stack, _place(call), at_end=_is_last(call)))

    def _summed(self, call: ActiveBlock, total: Tensor, target: Tensor | None = None) -> Tensor:
        if call.label is not None and not call.joins:
            with torch._C.DisableTorchFunction():
                total.copy_(self._stream(total, call.stack, _place(call), at_end=_is_last(call)))
        return super()._summed(call, total, target)

    def on_leave(self, call: ActiveBlock, out: Tensor) -> None:
        """Compare what leaves the block."""
        if self._differs(_place(call), out):
            self.changed.add(_place(call))
        if not call.is_stream(out):
            self.unfollowed.add(_place(call))
        if self._change in _SIZES:
            self.values[_place(call)] = out.detach().clone()
            with suppress(SiteError), torch._C.DisableTorchFunction():
                rows = replace(call.stack.stream, streams="join").canonical(out.detach(), sequences_in_pass())
                self.tokens[_place(call)] = rows.flatten(0, 1).clone()

    def _differs(self, place: Hashable, value: Tensor) -> bool:
        """Whether a value differs by more than rounding from that of the pass that changes nothing."""
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            return True
        with torch._C.DisableTorchFunction():
            if self._change == "nothing":
                self._kept.tensors[place] = value.detach().clone()
            before = self._kept.tensors.get(place)
            return before is None or _unlike(value, before)

    def _hooks(self, modules: Mapping[str, nn.Module]) -> Iterator[torch.utils.hooks.RemovableHandle]:
        for stack in self.view.stacks:
            for name in dict.fromkeys(call.module_name for call in stack.calls):
                yield modules[name].register_forward_pre_hook(self._given(stack), with_kwargs=True)
        for module in modules.values():
            if is_packed_linear(module):
                yield module.register_forward_hook(self._after_matrix)
        yield from super()._hooks(modules)

    def _given(self, stack: Stack) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            entry = first_tensor(args, kwargs)
            if entry is None or torch._C._functorch.is_functorch_wrapped_tensor(entry):
                return None
            number = self._calls_made.get(stack.name, 0)
            adds = [label for plan in stack.calls[min(number, len(stack.calls) - 1)].blocks for label in plan.skips]
            new = self._stream(entry, stack, (stack.name, number), at_end=not adds)
            return with_another((args, kwargs), entry, new)

        return hook

    def _after_matrix(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        out = output_tensor(output)
        if self._open is None or out is None or self._open.is_stream(out):
            return None
        return with_output_tensor(output, self._fixed(self._open, out.clone(), tensors_in(args)))


def _is_subtracted(summand: Tensor, stream: Tensor) -> bool:
    """Whether a sum takes the stream with a negative sign."""
    if torch._C._functorch.is_functorch_wrapped_tensor(stream):
        return False
    with torch._C.DisableTorchFunction():
        return summand.shape == stream.shape and float((summand * stream).sum()) < 0.0


def _unlike(value: Tensor, before: Tensor) -> bool:
    """Whether two tensors differ by more than rounding."""
    if before.shape != value.shape:
        return True
    return bool(differs(before, value, _ROUNDINGS).any())


def _every_other_token(like: Tensor, stack: Stack) -> Tensor:
    """Which entries of a stream belong to every other token; all of them if its axes are not known."""
    joined = replace(stack.stream, streams="join")
    try:
        batch, tokens, dim = joined.sizes(like.shape, sequences_in_pass())
    except SiteError:
        return torch.ones_like(like, dtype=torch.bool)
    chosen = (torch.arange(tokens, device=like.device) % 2 == 0)[None, :, None].expand(batch, tokens, dim)
    return joined.native(chosen, like.shape, sequences_in_pass())


def _normed_tokens(like: Tensor, stack: Stack) -> Tensor:
    """Tokens with mean zero and variance one, every third of which is the sum of the two before it, divided by sqrt(2).

    Random numbers if the axes of the stream are not known.
    """
    joined = replace(stack.stream, streams="join")
    try:
        batch, tokens, dim = joined.sizes(like.shape, sequences_in_pass())
    except SiteError:
        return _numbers(like, 3)
    drawn = torch.from_numpy(np.random.default_rng(5).standard_normal((dim, 3)))
    drawn[:, 0] = 1.0
    if dim < 3:
        return _numbers(like, 3)
    one, other = torch.linalg.qr(drawn)[0].T[1:] * dim**0.5
    rows = torch.stack([one, other, (one + other) * 0.5**0.5]).repeat(-(-batch * tokens // 3), 1)[: batch * tokens]
    return joined.native(rows.view(batch, tokens, dim), like.shape, sequences_in_pass()).to(like)


def _place(call: ActiveBlock) -> _Place:
    return call.stack.name, call.number


def _is_product(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether what is given to a function and a matrix of weights passes through the matrix."""
    if func in ADDED_MATRIX_PRODUCTS:
        return bool(args) and isinstance(args[0], nn.Parameter)  # only a bias is added
    return func not in _ELEMENTWISE


def _ungated(call: ActiveBlock | None, given: Sequence[Tensor]) -> Tensor | None:
    """A copy of the only stream that a product is given."""
    streams = [] if call is None else [tensor for tensor in given if call.is_stream(tensor)]
    with torch._C.DisableTorchFunction():
        return streams[0].clone() if len(streams) == 1 else None


def _is_last(call: ActiveBlock) -> bool:
    """Whether no known skip is still to come in this call."""
    return not call.cuts_to_come


def _weights_of(like: Tensor) -> Tensor:
    """Weights of a sum that tells two tensors apart."""
    return torch.arange(like.numel(), dtype=torch.float64, device=float64_home(like)).cos()


def _numbers(like: Tensor, seed: int) -> Tensor:
    """Fixed numbers of a shape."""
    drawn = np.random.default_rng(seed).standard_normal(tuple(like.shape), dtype=np.float32)
    return torch.from_numpy(drawn).to(like.device, like.dtype)


def _named(func: Callable[..., Any]) -> str:
    own = (str(func) if isinstance(func, HigherOrderOperator) else getattr(func, "__name__", "")).split(".")[0]
    return f"torch.{own}" if hasattr(torch, own) else own or str(func)
