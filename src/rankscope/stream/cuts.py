"""Proves that the known skips are the only way around the branches of a block.

A sum can be written in more ways than any list of operations has: a pooled stack, an FFT, a copy through NumPy. So each
call of a block is recorded, and replayed with fixed random numbers in place of every product with a matrix of weights,
and in place of the stream wherever it begins: at the entry of the call, and after each known sum. In replays in which

- the stream has other numbers at every beginning but the last, the output of the block must stay: the stream would get
  around a known sum.
- products that the stream reaches have other numbers, the stream must stay where a known sum takes it: something would
  be added to it by a sum that is not known. So must the output of the block, if the stream reaches it after the last
  known sum as well; without that, the block has no skip there. If the stream reaches both a product and the output
  there, that is enough: what the product does may be hidden, as in a gradient of an energy.
- the stream has other numbers after the sum of one branch, a parallel branch must stay.
- a constant has another value that was added to the stream before a known sum takes it, the branch must change: the
  constant would be a part of what the block adds, and be cut with the stream.

A branch without weights, as a sine of each entry, is not held fixed. If the stream reaches one, or goes on after the
last known sum through operations that are not known, further replays scale the stream of all tokens or of some, or
choose tokens for which a norm is linear. A branch must not grow in proportion, or it contains the stream. What follows
the last sum must be a norm of each token or act on each entry in proportion, or it may hide a sum.

Operations that no graph shows are a round trip through NumPy, or a kernel that writes to memory on its own. Their
results are tensors that appear from nowhere, or that are not what the recorded operation computes when it is replayed
on what it was given. Such a result counts as the stream, and as something that the stream reaches. So it must not be
what is added as a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise, repeat

import numpy as np
import torch
from torch import Tensor

from rankscope.errors import SiteError
from rankscope.models.inputs import sequences_in_pass
from rankscope.models.loading.devices import seed_generators
from rankscope.models.view import BranchParts, Carry, Label, ModelView, Stack
from rankscope.pass_graph.ir import Call, Graph, Node, Value
from rankscope.pass_graph.replay import CannotReplayError, changed, content_of, replay, result_of, unlike
from rankscope.stream.block_recorder import BlockRecorder
from rankscope.stream.carries import kind_of
from rankscope.stream.operators import DIVISIONS, JOINS, MOVES, MULTIPLICATIONS, NORMS, PRODUCTS, SDPA, SUMS
from rankscope.stream.parts import parts_of
from rankscope.stream.passes import Pass
from rankscope.stream.tokens import Tokens

_GAINS = MULTIPLICATIONS | DIVISIONS
_ELEMENTWISE = SUMS | _GAINS | MOVES | NORMS | JOINS
_UNSEEN = "an operation that cannot be followed"
_Place = tuple[str | None, int]
_FAR = 2.0**16
_GROWS = 2.0**-10
"""A branch whose entries are larger than this, divided by the factor on the stream, grows in proportion to it."""
_MOST = 0.75
"""Share of a branch that has to grow: of an activation, as ReLU, half of the entries do."""
_ROUNDINGS = 64


def with_leaks(view: ModelView, run: Callable[[], object], sequences: int) -> ModelView:
    """The view, with a carry for each block around whose branches the stream gets in an unknown way.

    Args:
        view: the model and its structure.
        run: runs the model on the inputs on which its structure was found.
        sequences: number of sequences in them.
    """
    if not all(stack.stream.has_plain_blocks for stack in view.stacks):
        return view
    proof = _Blocks(view)
    with torch.random.fork_rng(devices=[]):
        seed_generators(0)
        with Pass(sequences, sums=view.stacks[0].sums, recorder=proof).on(view.model):
            run()
    return replace(view, stacks=tuple(_with(stack, proof) for stack in view.stacks))


def _with(stack: Stack, proof: _Blocks) -> Stack:
    """The stack, with carries for the leaks in calls in which none is known."""
    leaking = []
    for number, call in enumerate(stack.calls):
        last = call.first_layer + len(call.blocks) - 1
        uncut = (carry for carry in stack.carries if carry.calls_begun is None)
        known = any(carry.first <= last and carry.last >= call.first_layer for carry in uncut)
        if (stack.name, number) in proof.leaks and not known:
            leaking.append(Carry(call.module_name, proof.met[stack.name, number], call.first_layer, last))
    renamed = [_first_met(stack, carry, proof) for carry in stack.carries]
    calls = (replace(call, parts=proof.parts.get((stack.name, number))) for number, call in enumerate(stack.calls))
    return replace(stack, calls=tuple(calls), carries=(*renamed, *leaking), cuts_proven=True)


def _first_met(stack: Stack, carry: Carry, proof: _Blocks) -> Carry:
    """A carry of one block, named after the first unknown sum in it: what follows only passes that on."""
    places = [(stack.name, number) for number, call in enumerate(stack.calls) if call.module_name == carry.module]
    alone = sum(other.module == carry.module for other in stack.carries) == 1
    if not alone or len(places) != 1 or carry.calls_begun is not None:
        return carry
    return replace(carry, operation=proof.met.get(places[0]) or carry.operation)


class _Blocks(BlockRecorder):  # type: ignore[no-untyped-call]
    """Looks for leaks when a block ends.

    Args:
        view: the model and its structure.

    Attributes:
        leaks: calls of blocks around whose branches the stream gets, or of which that cannot be told.
        met: the first operation of each call in which the stream meets a product, and which is not a known sum.
        parts: what the branches of each call consist of.
    """

    def __init__(self, view: ModelView) -> None:
        super().__init__(view.stacks)
        self.leaks: set[_Place] = set()
        self.met: dict[_Place, str] = {}
        self.parts: dict[_Place, BranchParts] = {}
        for module in view.model.modules():
            held = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
            for tensor in held:
                if isinstance(tensor, Tensor):
                    self.value_of(tensor)

    def begun(self, call: Call, stack: Stack, number: int) -> None:
        """Learned queries are the stream now, and no weights."""
        if call.taken is not None:
            call.taken.is_weight = call.taken.is_parameter = False

    def ended(self, call: Call, stack: Stack, number: int) -> None:
        """Look for leaks."""
        place = stack.name, number
        labels = [label for plan in stack.calls[number].blocks for label in plan.adds]
        self.parts[place] = parts_of(self.graph.nodes, call, labels)
        try:
            question = _Question(self.graph, call, stack, number)
            leaks = question.finds_leak()
            self.met[place] = question.name() if leaks or stack.carries else ""
        except CannotReplayError:
            leaks, self.met[place] = True, _UNSEEN
        if leaks:
            self.leaks.add(place)


@dataclass
class _Sum:
    """A known sum of a call.

    Attributes:
        carried: the stream that it takes.
        own: the summand that contains it.
        branch: the other one.
        begins: the stream after it; None if what came of the sum was not found.
        label: of the branch.
        joins: whether the branch is parallel to the one before.
        is_projected: whether the two are put side by side and projected, so that a new stream begins after it.
    """

    carried: Value
    own: Value
    branch: Value
    begins: Value | None
    label: Label | None
    joins: bool
    is_projected: bool

    @property
    def may_contain_stream(self) -> bool:
        """Whether a branch that grows with the stream contains it: it acts on tokens alone, or is subtracted."""
        own, carried = content_of(self.own, {}), content_of(self.carried, {})
        return self.label == "mlp" or (own.shape == carried.shape and float((own * carried).sum()) < 0.0)


class _Question:
    """One call of a block, replayed with fixed numbers for the stream at its beginnings and for products with weights.

    Args:
        graph: the operations of the call.
        call: the call itself.
        stack: its stack.
        number: of the call in the stack.
    """

    def __init__(self, graph: Graph, call: Call, stack: Stack, number: int) -> None:
        if call.taken is None or call.returned is None:
            raise CannotReplayError("no tensor that could be the stream")
        self.graph, self.nodes, self.stack, self.out = graph, graph.nodes, stack, call.returned
        nodes = self.nodes
        plans = stack.calls[number].blocks
        planned = [add for plan in plans for add in zip(plan.adds, plan.joins or repeat(False), strict=False)]
        added = {
            add: (node.function.func in JOINS, values)
            for node in nodes if node.function is not None
            for of, add, values in node.function.adds if of == call.number
        }  # fmt: skip
        if sorted(added) != list(range(len(planned))):
            raise CannotReplayError("other sums than when the structure was found")
        self.sums = [
            _Sum(carried, own, branch, call.sums.get(add), *planned[add], is_projected)
            for add, (is_projected, (carried, own, branch)) in sorted(added.items(), key=lambda item: item[0])
        ]
        self.cut = [one for one in self.sums if one.label is not None]
        begun = [one.begins for one in self.sums if one.label is not None or one.is_projected]
        last = next((one.begins for one in reversed(self.cut) if not one.joins), None)
        after = next((at + 1 for at, node in enumerate(nodes) if last in node.outputs), 0)
        # A gain on a stream that is still followed is no sum. After the last known sum, no skip has that gain.
        self.gained = [
            value for node in nodes[:after] if node.function is not None and node.function.func in _GAINS
            for value in node.outputs if value in call.stream
        ]  # fmt: skip
        self.beginnings = [call.taken, *self.gained, *(value for value in begun if value is not None)]
        self.last = self.beginnings[-1]
        self.after = nodes[after:]
        # One that writes to the stream in place is not known to return it.
        made = [node.function for node in nodes if not call.stream.keys().isdisjoint(node.outputs)]
        is_known = all(function is None or function.func in _ELEMENTWISE for function in made)
        self.ends_as_stream = call.returned in call.stream and is_known
        self.products = [value for node in nodes if _is_product(node) for value in node.outputs if _is_content(value)]
        appeared = [
            one for one in graph.appeared if _is_content(one) and one.shape.numel() > 1 and not one.is_parameter
        ]
        self.unseen = [*appeared, *_unlike_record(nodes, set(self.products))]
        self.base = {value: content_of(value, {}) for value in self.unseen}
        self.base |= {value: _numbers(content_of(value, {}), 1) for value in self.products}
        self.base |= {value: _numbers(content_of(value, {}), 3) for value in self.beginnings}
        self.control = replay(nodes, self.base)

    def finds_leak(self) -> bool:
        """Whether the stream gets around a branch."""
        return any(self._leaks())

    def _leaks(self) -> Iterator[bool]:
        yield any(one.begins is None for one in self.cut)  # what came of a sum was not found
        # The stream at all its beginnings but the last: around a known sum.
        early = self._with(self._other([one for one in self.beginnings if one is not self.last] + self.unseen))
        yield self._moves(self.out, early)
        # What products return of the stream: a sum that is not known, before a known one takes the stream.
        reached = self._reached_from(self.beginnings + self.unseen)
        weights = self._with(self._other(reached + self.unseen))
        yield any(self._moves(known.carried, weights) for known in self.cut)
        # What is added as a constant, and comes from an operation that is not seen: the stream may be in it.
        constants = [one.branch for one in self.sums if one.label is None]
        if constants and self.unseen:
            moved = self._spread(self.unseen)[1]
            yield any(self._moves(constant, moved) for constant in constants)
        # The stream after the last known sum, and products: a sum that is not known after it.
        goes_on = self._moves(self.out, self._with(self._other([self.last])))
        if goes_on:
            yield self._moves(self.out, weights)
            then = {value for node in self.after for value in node.outputs}
            yield not then.isdisjoint(self._reached_from([self.last]))
            yield any(node.is_opaque and node.name != "flex_attention" for node in self.after)
        for before, known in pairwise(self.sums):
            if known.joins and before.begins is not None:
                # A branch that was taken to be parallel to the one before, and depends on its sum.
                yield self._moves(known.branch, self._spread([before.begins, *self.unseen])[1])
            if known.label is not None and before.label is None and before.begins is not None:
                # A constant that was added to the stream, and that only the sum sees, is a part of what the block adds.
                free = copy(self)  # in which it goes on through gains
                free.base = {value: one for value, one in self.base.items() if value not in self.gained}
                free.control = replay(self.nodes, free.base)
                moved = free._spread([before.begins])[1]
                yield free._moves(known.carried, moved) and not free._moves(known.branch, moved)
        # Branches without weights.
        branches = [known.branch for known in self.cut if not known.joins and known.may_contain_stream]
        branches = [branch for branch in branches if self._moves(branch, early)]
        if branches:
            far = self._with(self._scaled(_FAR, 1.0))
            grows = [content_of(branch, far).abs() > _GROWS * _FAR for branch in branches]
            yield any(float(one.double().mean()) > _MOST for one in grows)
        if goes_on and not self.ends_as_stream:
            yield not self._ends_in_proportion() and not self._ends_with_norm()

    def name(self) -> str:
        """The first operation in which the stream meets a product, or the last one that may be a sum, in words."""
        if any(value.node is not None for value in self.unseen) and self.graph.unrecorded:
            return self.graph.unrecorded[-1].name
        may_sum = [
            node for node in self.nodes
            if node.function is not None and node.function.func not in MOVES | JOINS | NORMS
            and not node.function.name.startswith("__")
        ]  # fmt: skip
        with suppress(CannotReplayError):
            stream = self._with(self._other(self.beginnings + self.unseen))
            weights = self._with(self._other(self._reached_from(self.beginnings + self.unseen) + self.unseen))
            known = {
                value for one in self.beginnings for value in (one, *(() if one.node is None else one.node.outputs))
            }
            for node in may_sum:
                is_product = node.function is not None and node.function.func in PRODUCTS | {SDPA}
                made = [value for value in node.outputs if value not in known and not is_product]
                if any(self._moves(value, stream) and self._moves(value, weights) for value in made):
                    return node.written_as
        return may_sum[-1].written_as if may_sum else _UNSEEN

    def _with(self, new: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
        return replay(self.nodes, {**self.base, **new})

    def _other(self, values: Sequence[Value]) -> dict[Value, Tensor]:
        return {value: _numbers(content_of(value, self.base), 4) for value in values}

    def _moves(self, value: Value, other: Mapping[Value, Tensor]) -> bool:
        return changed(value, self.control, other)

    def _spread(self, sources: Sequence[Value]) -> tuple[list[Value], dict[Value, Tensor]]:
        """The products that other numbers at these values reach, also through one another; and the replay with all."""
        reached: list[Value] = []
        while True:
            other = self._with(self._other([*sources, *reached]))
            new = [
                value for value in self.products
                if value not in reached and value.node is not None
                and any(self._moves(given, other) for given in value.node.inputs)
            ]  # fmt: skip
            if not new:
                return reached, other
            reached += new

    def _reached_from(self, sources: Sequence[Value]) -> list[Value]:
        return self._spread(sources)[0]

    def _scaled(self, factor: float, of_some: float) -> dict[Value, Tensor]:
        """The stream times a number, and for some tokens times another."""
        some = {value: _some_tokens(self.base[value], self.stack) for value in self.beginnings}
        return {
            value: self.base[value] * factor * torch.where(some[value], of_some, 1.0).to(self.base[value])
            for value in self.beginnings
        }

    def _ends_in_proportion(self) -> bool:
        """Whether what follows the last sum acts on each token, or entry, in proportion."""
        plain, none, some = (
            content_of(self.out, known)
            for known in (self.control, self._with(self._scaled(0.0, 1.0)), self._with(self._scaled(1.0, 2.0)))
        )
        chosen = _some_tokens(self.base[self.last], self.stack)
        if not plain.shape == none.shape == some.shape == chosen.shape:
            return False
        return not unlike(some, torch.where(chosen, 2 * plain - none, plain))

    def _ends_with_norm(self) -> bool:
        """Whether the output is a norm of each token, times weights and plus a bias.

        The tokens are those of :func:`_normed_tokens` and their negatives, so that a norm leaves them as they are, but
        for a factor that all have.
        """
        rows = []
        layout = replace(self.stack.stream, streams="join")
        for factor in (_FAR, -_FAR):
            new = {one: factor * _normed_tokens(self.base[one], self.stack) for one in self.beginnings}
            try:
                rows.append(layout.canonical(content_of(self.out, self._with(new)), sequences_in_pass()).flatten(0, 1))
            except SiteError:
                return False
        bias, weighted = (rows[0] + rows[1]) / 2, (rows[0] - rows[1]) / 2
        whole = len(bias) // 3 * 3
        one, other, both = (weighted[first:whole:3] for first in range(3))
        limit = _ROUNDINGS * torch.finfo(bias.dtype).eps * rows[0].abs().max()
        return whole > 0 and bool(
            ((bias - bias[:1]).abs() <= limit).all() and (((one + other) * 0.5**0.5 - both).abs() <= limit).all()
        )


def _is_product(node: Node) -> bool:
    """Whether something passes through a matrix of weights."""
    given = [value for value in node.inputs if _is_content(value)]
    if not any(value.is_weight for value in given) or all(value.is_parameter for value in given):
        return False
    kind, _, read = kind_of(node)
    return kind == "transforms" and all(value.is_parameter for value in read)  # only a bias is added


def _is_content(value: Value) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def _unlike_record(nodes: Sequence[Node], held: set[Value]) -> list[Value]:
    """What operations returned that do not compute the same once more: something else wrote to it."""
    found: list[Value] = []
    for node in nodes:
        if node.is_random or held.issuperset(node.outputs) or not any(map(_is_content, node.outputs)):
            continue
        try:
            made = result_of(node, {})
        except CannotReplayError:
            made = [None] * len(node.outputs)
            found += [value for value in node.outputs if _is_content(value)]
        for value, once_more in zip(node.outputs, made, strict=True):
            if once_more is not None and unlike(content_of(value, {}), once_more):
                found.append(value)
    return found


def _some_tokens(like: Tensor, stack: Stack) -> Tensor:
    """Which entries of a stream belong to some of its tokens; all of them if its axes are not known."""
    sequences = sequences_in_pass()
    chosen = None if sequences is None else Tokens(like.shape, sequences, stack.stream).replaced(0)
    return torch.ones_like(like, dtype=torch.bool) if chosen is None else chosen.to(like.device)


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


def _numbers(like: Tensor, seed: int) -> Tensor:
    """Fixed numbers of a shape."""
    shape = (*like.shape, 2) if like.is_complex() else tuple(like.shape)
    drawn = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))
    return (torch.view_as_complex(drawn) if like.is_complex() else drawn).to(like.device, like.dtype)
