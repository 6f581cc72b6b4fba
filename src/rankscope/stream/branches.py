"""Reads from a recorded pass what a branch is that is added to the stream: attention, a mixer, an MLP, or both.

A branch is everything between the sum that adds it and the places where the stream began before: the entry of the
module call, and each earlier sum. In ``x = x + attention(norm(x))`` these are the nodes from ``norm`` to the last
product of ``attention``. Their names say whether there is attention in it. Whether it acts on each token alone is
asked:

- The nodes are replayed with some tokens of the stream replaced, wherever it begins: each branch is tested alone.
- A branch *mixes* if what it adds to any other token changes, and acts on tokens *alone* if it changes for replaced
  tokens only. One that does not change at all, as with weights that are zero, is replayed with other weights in place
  of these; if it does not change either, it is left undecided.

The replay shows all values inside the branch as well. Where one that mixes tokens and one that does not are added, the
branch is ``both``: attention and an MLP side by side.

What decides is the graph alone: names of modules are only reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntFlag
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rankscope.models.loading.devices import seed_generators
from rankscope.models.view import Label, Response
from rankscope.pass_graph.identity import inside
from rankscope.pass_graph.ir import Call, Node, Value, way_back
from rankscope.pass_graph.replay import CannotReplayError, changed, content_of, replay, result_of
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.operators import ADDED_MATRIX_PRODUCTS, ADDS, MULTI_HEAD, PRODUCTS, PROJECTIONS, SDPA
from rankscope.stream.tokens import PASSES, Tokens, is_plain

MATRIX_PRODUCTS: frozenset[Callable[..., Any]] = (
    PRODUCTS | PROJECTIONS | ADDED_MATRIX_PRODUCTS | {torch.mm, Tensor.mm, torch.tensordot, SDPA, MULTI_HEAD}
)
_LARGEST = 1 << 26
"""Larger parameters that are zero stay zero: weights that are read later, block by block, take no memory yet."""
_ROUNDINGS = 64
_WHOLE = "module"
"""Name of an operation that is the whole call of a module."""


class Attention(NamedTuple):
    """The values of one evaluation of softmax attention.

    Attributes:
        query: the queries, or the scores if these were computed by the model's own operations.
        keys: the keys, or the factors of each product from which the scores were computed.
    """

    query: Value
    keys: tuple[tuple[Value, ...], ...]

    def crosses(self, strand: Strand) -> bool:
        """Whether its queries come from the stream, and its keys do not."""
        return strand.reaches(self.query) and not any(all(map(strand.reaches, factors)) for factors in self.keys)


class Giver(NamedTuple):
    """A module that returned a value.

    Attributes:
        name: qualified name.
        has_weights: whether it has parameters.
        has_matrix: whether one of them is a matrix.
        normalises: whether it is a norm.
    """

    name: str
    has_weights: bool
    has_matrix: bool
    normalises: bool


@dataclass
class Seen:
    """What else was seen in a pass.

    Attributes:
        attention: the attention, by the value that it returned.
        givers: the modules that returned a value, from the innermost outwards.
        reads: the values that the author's code has turned into numbers, and the call in which it did.
    """

    attention: dict[Value, Attention] = field(default_factory=dict)
    givers: dict[Value, list[Giver]] = field(default_factory=dict)
    reads: list[tuple[Value, Call]] = field(default_factory=list)

    def weighty(self, value: Value) -> str | None:
        """The innermost module with parameters that returned exactly this value."""
        return next((giver.name for giver in self.givers.get(value, ()) if giver.has_weights), None)

    def is_mapped(self, value: Value) -> bool:
        """Whether the innermost module with parameters that returned this value is not a norm."""
        return not next((giver.normalises for giver in self.givers.get(value, ()) if giver.has_weights), True)

    def with_matrix(self, value: Value) -> str | None:
        """The outermost module with a matrix that returned this value."""
        found = [one.name for one in self.givers.get(value, ()) if one.has_matrix and not one.normalises]
        return found[-1] if found else None


class Strand:
    """The residual stream of one module call.

    Args:
        entry: what the call was given.
        number: of the call.
        start: number of the first operation in it.
        tokens: where the tokens of the stream are.

    Attributes:
        begins: where the stream begins: at the entry, and after each sum; and the sums through which it has come, as
            bits.
        newest: the last of these.
        follows: every value that is the stream, or a norm of it.
    """

    def __init__(self, entry: Value, number: int, start: int, tokens: Tokens) -> None:
        self.number, self.start, self.tokens = number, start, tokens
        self.begins = {entry: 0}
        self.newest = {entry}
        self.follows = {entry}
        self._reaches = {entry: True}

    def begin(self, value: Value, passed: int, *, is_new: bool = True) -> None:
        """From here on the stream is this value; ``passed`` are the sums that it has come through."""
        self.begins[value] = passed
        self.newest = {value} if is_new else self.newest | {value}
        self._reaches[value] = True

    def passed(self, begins: Iterable[Value]) -> int:
        """The sums through which some beginnings have come."""
        bits = 0
        for value in begins:
            bits |= self.begins[value]
        return bits

    def reaches(self, value: Value) -> bool:
        """Whether a value was computed from what the call was given."""
        todo = [value]
        while todo:
            node = todo[-1].node
            unknown: list[Value] = []
            if todo[-1] not in self._reaches:
                is_made_here = node is not None and node.number >= self.start
                given = node.inputs if node is not None and is_made_here else ()
                unknown = [one for one in given if one not in self._reaches]
                if not unknown:
                    self._reaches[todo[-1]] = any(self._reaches[one] for one in given)
            todo = [*todo, *unknown] if unknown else todo[:-1]
        return self._reaches[value]

    def made_by(self, value: Value) -> Node | None:
        """The operation of the call that made a value; None for what it was given and where the stream begins."""
        is_own = value.node is not None and value.node.number >= self.start and value not in self.begins
        return value.node if is_own else None

    def back_from(self, values: Iterable[Value], *, replays: bool = False) -> tuple[list[Node], list[Value]]:
        """The operations between the beginnings of the stream and some values, in order; and the beginnings reached.

        With ``replays``, only operations whose inputs were kept: what others made is taken as it is.
        """
        nodes: dict[Node, None] = {}
        reached: dict[Value, None] = {}

        def before(value: Value) -> Sequence[Value]:
            if value in self.begins:
                reached[value] = None
            node = self.made_by(value)
            if node is None or (replays and not all(map(_is_known, _given(node)))):
                return ()
            nodes[node] = None
            return (*node.inputs, *node.written)

        deque(way_back(values, before), maxlen=0)
        return sorted(nodes, key=lambda node: node.number), list(reached)


class _Source(IntFlag):
    """Through what a value was computed, since the stream began.

    ATTENTION, CROSS: attention, cross-attention. OTHER: also through something that was added to it. MAPPED: a product
    with a matrix.
    """

    NONE = 0
    ATTENTION = 1
    CROSS = 2
    OTHER = 4
    MAPPED = 8


@dataclass
class Role:
    """What a branch is.

    Attributes:
        label: None if it does not come from the stream.
        response: how it responded when tokens were replaced; None if it did not.
        parallel_mlp: the module whose output is added to attention before both are added to the stream.
        beside: what acts on tokens alone in a branch that mixes them, and is joined with it in an unknown form.
    """

    label: Label | None
    response: Response | None = None
    parallel_mlp: str | None = None
    beside: str | None = None


@dataclass
class Branch:
    """What is added to the stream of one module call.

    Attributes:
        strand: the stream.
        values: from which the branch is formed.
        seen: what else was seen in the pass.
        passed: the sums of the call through which it was computed, as bits.
        is_new: whether it was computed from the stream as it has been since the last sum.
    """

    strand: Strand
    values: Sequence[Value]
    seen: Seen
    passed: int = field(init=False)
    is_new: bool = field(init=False)
    _sources: dict[Value, _Source] = field(default_factory=dict)
    _other: Value | None = None

    def __post_init__(self) -> None:
        self._nodes, begins = self.strand.back_from(self.values)
        self.passed = self.strand.passed(begins)
        self.is_new = not self.strand.newest.isdisjoint(begins)
        for node in self._nodes:
            self._pass_on(node)

    def _pass_on(self, node: Node) -> None:
        """What the outputs of a node were computed through."""
        given = [value for value in node.inputs if self.strand.reaches(value)]
        source = _Source.NONE
        for value in given:
            source |= self.source(value)
        func = None if node.function is None else node.function.func
        if given and func in MATRIX_PRODUCTS:
            source |= _Source.MAPPED
        # A parallel block adds attention(x) + mlp(x) first and the sum to the stream afterwards.
        if func in ADDS and len(given) == 2:
            others = [value for value in given if not self.source(value) & _Source.ATTENTION]
            if len(others) == 1:
                source |= _Source.OTHER
                if self.strand.follows.isdisjoint(given):
                    self._other = others[0]
        for value in node.outputs:
            own = self.seen.attention.get(value)
            if value in self.strand.follows:
                self._sources[value] = _Source.NONE
            elif own is not None:
                cross = _Source.CROSS if own.crosses(self.strand) else _Source.NONE
                self._sources[value] = source | _Source.ATTENTION | cross
            else:
                self._sources[value] = source

    def source(self, value: Value) -> _Source:
        """Through what a value of this branch was computed."""
        return self._sources.get(value, _Source.NONE)

    @cached_property
    def is_mapped(self) -> bool:
        """Whether it went through a matrix."""
        return any(self.source(value) & _Source.MAPPED for value in self.values)

    @cached_property
    def label(self) -> Label | None:
        """What its operations say; what acts on tokens alone for all they say is called an MLP."""
        if not any(map(self.strand.reaches, self.values)):
            return None
        sources = _Source.NONE
        for value in self.values:
            sources |= self.source(value)
        if sources & _Source.ATTENTION:
            if sources & _Source.OTHER:
                return "both"
            return "cross_attention" if sources & _Source.CROSS else "attention"
        return "mlp"

    # What the replay shows.

    def role(self, added: Value, known: dict[object, _Replayed]) -> Role:
        """What the branch is, by its operations and its response.

        Args:
            added: the branch as it is added.
            known: replays of what is added, for calls inside of each other that see the same stream and sum.
        """
        found = Role(self.label)
        if found.label is None:
            return found
        if self._other is not None:
            found.parallel_mlp = self.seen.weighty(self._other)
        _, begins = self.strand.back_from([added])
        replayed = known.setdefault((*begins,), _Replayed(self.strand, added, self.seen))
        found.response = replayed.response(added)
        if found.response is None and replayed.draw_silent():
            # A branch times a gain of zero, as at the start of training, shows nothing: once more with other numbers.
            found.response = replayed.response(added)
        if found.response is None:
            return found
        pairs = list(self._pairs(replayed))
        of_own = [pair for pair, is_own in pairs if is_own]
        beside = self._alone(of_own)
        if found.label == "both" or beside:
            found.parallel_mlp = next(iter(beside)) if len(beside) == 1 else None
        if found.label == "both" and not beside:
            # Of several parts that mix tokens: two branches of the block, or values that are convolved in a module.
            seen = of_own or [pair for pair, is_own in pairs if not is_own]
            if not self._alone(seen) and any(pair.keys() == {"mixes"} for pair in seen):
                found.label = "attention"
        elif found.label == "mlp" and found.response == "mixes":
            found.label = "both" if beside else "mixer"
        elif found.label == "attention" and found.response == "alone":
            found.label = "mlp"
        found.beside = self._joined(replayed, added)
        return found

    def _pairs(self, replayed: _Replayed) -> Iterator[tuple[dict[Response | None, Value], bool]]:
        """The two terms of each sum in the branch, by how they respond; and whether the call itself adds them."""
        for node in self._nodes:
            if node.function is None or node.function.func not in ADDS or len(node.inputs) != 2:
                continue
            is_part = self.strand.follows.isdisjoint(node.inputs) and any(map(self.strand.reaches, node.inputs))
            if is_part and all(self.strand.tokens.fits(value.shape) for value in node.inputs):
                pair = {replayed.response(value, is_part=True): value for value in node.inputs}
                yield pair, _owner(node) == self.strand.number

    def _alone(self, pairs: Iterable[Mapping[Response | None, Value]]) -> set[str | None]:
        """The modules that act on tokens alone and whose results are added to what mixes them."""
        found = [pair["alone"] for pair in pairs if pair.keys() == {"mixes", "alone"}]
        return {self.seen.weighty(value) for value in found if self._has_weights(value)}

    def _has_weights(self, value: Value) -> bool:
        return bool(self.source(value) & _Source.MAPPED) or self.seen.is_mapped(value)

    def _joined(self, replayed: _Replayed, added: Value) -> str | None:
        """What acts on tokens alone and is put together with what mixes them by an operation that is no plain sum.

        What is put together inside a module with weights is that module's own, and so is what a matrix makes of it.
        """

        def node_of(value: Value) -> Node | None:
            node = self.strand.made_by(value)
            func = None if node is None or node.function is None else node.function.func
            is_layer = node is not None and func in MATRIX_PRODUCTS and any(one.is_weight for one in node.inputs)
            return None if is_layer or self.seen.with_matrix(value) is not None else node

        for value in way_back([added], lambda value: () if (node := node_of(value)) is None else node.inputs):
            node = node_of(value)
            if node is None:
                continue
            func = None if node.function is None else node.function.func
            parts = [one for one in node.inputs if self.strand.reaches(one) and self.strand.tokens.fits(one.shape)]
            if func in ADDS or len(parts) < 2 or not self.strand.follows.isdisjoint(parts):
                continue
            given = {replayed.response(one, is_part=True): one for one in parts}
            mixing, alone = given.get("mixes"), given.get("alone")
            if mixing is None or alone is None or not (self._has_weights(alone) or self._giver(alone)):
                continue
            if _adds(node, mixing, alone):
                return self._giver(alone) or "its own forward"
        return None

    def _giver(self, value: Value) -> str | None:
        """The last module with a matrix from whose output a value was computed, if there is one alone."""
        names: set[str] = set()

        def before(value: Value) -> Sequence[Value]:
            name, node = self.seen.with_matrix(value), self.strand.made_by(value)
            names.update([] if name is None else [name])
            return () if name is not None or node is None else node.inputs

        deque(way_back([value], before), maxlen=0)
        return names.pop() if len(names) == 1 else None


class _Replayed:
    """A branch, computed once more as it is and with sets of tokens replaced.

    Args:
        strand: the stream.
        added: the branch as it is added.
        seen: what else was seen in the pass.
    """

    def __init__(self, strand: Strand, added: Value, seen: Seen) -> None:
        self._strand = strand
        self._nodes, self._begins = strand.back_from([added], replays=True)
        first = max((_number(value) for value in self._begins), default=-1)
        reads = [
            (value, call) for value, call in seen.reads
            if first < _number(value) < _number(added) and strand.reaches(value)
        ]  # fmt: skip
        self._nodes, self._begins = strand.back_from([added, *(value for value, _ in reads)], replays=True)
        self._base: dict[Value, Tensor] = {}
        self._run()
        # What the author's code does with numbers, as where it counts the tokens of each expert, no operation shows. If
        # it reads other numbers, the module that reads them is run.
        moved = [call for value, call in reads if self._is_moved(value)]
        self._is_known = all(self._run_as_one(call, added) for call in moved)
        if moved:
            self._run()

    def _is_moved(self, value: Value) -> bool:
        return not self._passes or any(changed(value, self._control, one) for one in self._passes)

    def _run_as_one(self, call: Call, added: Value) -> bool:
        """Replay the outermost call around this one, within the branch, by running its module; whether there is one."""
        within = [one for one in call.around if one.run is not None and self._is_between(one, added)]
        if not within:
            return any(node.name == _WHOLE and node.call in set(call.around) for node in self._nodes)
        whole = within[-1]
        (args, kwargs), span = whole.given, range(*whole.span)
        given = inside((args, kwargs), Value)
        made = tuple(value for value in dict.fromkeys(whole.made) if value not in given)
        assert whole.run is not None
        node = Node(_WHOLE, whole.run, args, kwargs, tuple(given), made, call=whole, number=span.start)
        rest = [one for one in self._nodes if one.number not in span]
        self._nodes = sorted([*rest, node], key=lambda one: one.number)
        return True

    def _is_between(self, call: Call, added: Value) -> bool:
        """Whether a call has ended, and neither a beginning of the stream nor the sum is in it."""
        span = range(*call.span)
        made = [
            one.node.number for one in (*self._strand.begins, added) if one.node is not None and one not in call.made
        ]
        return call.returned is not None and len(span) > 0 and not any(number in span for number in made)

    def _run(self) -> None:
        self._control: dict[Value, Tensor] = {}
        self._passes: list[dict[Value, Tensor]] = []
        with suppress(CannotReplayError):
            own = {value: content_of(value, {}) for value in self._begins}
            control, passes = self._replay(own), []
            for number in range(PASSES):
                other = {value: self._strand.tokens.with_others(one, number) for value, one in own.items()}
                if not other or any(one is None for one in other.values()):
                    return
                passes.append(self._replay({value: one for value, one in other.items() if one is not None}))
            self._control, self._passes = control, passes

    def _replay(self, new: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
        # The same random numbers in every replay, and none of those that the pass itself draws later.
        with torch.random.fork_rng(devices=[]):
            seed_generators(0)
            try:
                return replay(self._nodes, {**self._base, **new}, chooses=True)
            except CannotReplayError:
                return replay(self._nodes, {**self._base, **new})  # other choices have other shapes

    def draw_silent(self) -> bool:
        """Put other numbers in place of the parameters that hide what acts on what; whether there are any.

        These are zero, as gains and last layers are where training begins, or hold NaN or infinity.
        """
        leaves = {value for node in self._nodes for value in _given(node) if value.node is None and value.is_parameter}
        for value in leaves:
            content = value.content
            if content is not None and is_plain(content) and content.numel() <= _LARGEST and _is_silent(content):
                self._base[value] = _drawn(content)
        if self._base:
            self._run()
        return bool(self._base)

    def response(self, value: Value, *, is_part: bool = False) -> Response | None:
        """How a value of the branch responded to replaced tokens."""
        if not self._passes or not self._is_known:
            return None
        try:
            before, *after = (content_of(value, known) for known in (self._control, *self._passes))
        except CannotReplayError:
            return None
        return self._strand.tokens.response(before, after, is_part=is_part)


def of_call(
    call: AttentionCall, value_of: Callable[[Tensor], Value], products: Sequence[tuple[Value, ...]]
) -> Attention | None:
    """The values of an attention call; None if its keys are weights.

    Keys that are weights are a memory, which every token reads alone, as an MLP.

    Args:
        call: the attention.
        value_of: gives the value that a tensor has.
        products: the factors of the products from which its scores were computed, if it has any.
    """
    if call.scores is not None:
        return Attention(value_of(call.scores), tuple(products))
    assert call.query is not None
    assert call.key is not None
    key = value_of(call.key)
    return None if key.is_parameter else Attention(value_of(call.query), ((key,),))


def _adds(node: Node, one: Value, other: Value) -> bool:
    """Whether what an operation makes of one value does not depend on the other; True if it cannot be tried.

    A product of the two, as of a gate or of attention weights and values, does.
    """
    if node.is_opaque:
        return node.name != "flex_attention"

    def result(moved_one: Tensor, moved_other: Tensor) -> Tensor:
        made = result_of(node, {one: moved_one, other: moved_other}, chooses=True)
        return torch.cat([one.flatten().double() for one in made if one is not None and one.is_floating_point()])

    try:
        before, added = content_of(one, {}), content_of(other, {})
        plain, changed = (result(before, value) for value in (added, added * 2))
        elsewhere, changed_elsewhere = (result(before + before.std(), value) for value in (added, added * 2))
    except (CannotReplayError, RuntimeError):
        return True
    change = changed - plain
    size = max(float(tensor.abs().max()) for tensor in (plain, changed, elsewhere, changed_elsewhere))
    rounding = _ROUNDINGS * torch.finfo(added.dtype).eps * size
    return float(change.abs().max()) > rounding >= float((changed_elsewhere - elsewhere - change).abs().max())


def _given(node: Node) -> list[Value]:
    return [*inside((node.args, node.kwargs), Value), *node.written]


def _number(value: Value) -> int:
    return -1 if value.node is None else value.node.number


def _is_known(value: Value) -> bool:
    return value.content is not None


def _owner(node: Node) -> int | None:
    """Number of the innermost numbered call in which an operation ran."""
    call = node.call
    while call is not None and call.number is None:
        call = call.parent
    return None if call is None else call.number


def _is_silent(weight: Tensor) -> bool:
    return not bool(weight.any()) or not bool(weight.isfinite().all())


def _drawn(like: Tensor) -> Tensor:
    """Random numbers that keep the scale of what they are multiplied with."""
    scale = max(1, like[0].numel() if like.dim() else 1) ** -0.5
    drawn = np.asarray(np.random.default_rng(0).normal(0.0, scale, tuple(like.shape)))
    return torch.from_numpy(drawn).to(like.device, like.dtype)
