"""Finds the places where a forward pass carries the residual stream around computations on it.

The recorded pass is replayed as if every skip known to surgery had been removed. If the stream from an earlier point is
still combined with something computed from it, that is a skip which surgery would leave in place: a long skip between
blocks, an input that is injected again, or a sum written in a form that is not recognised.

This is a dataflow analysis. Each value has four sets of *points*. A point is the output of a map that transforms its
input (a matrix, attention, an embedding) or an input of the model. A skip shows up where one operand of a sum still
*carries* a point from which the other operand was *computed*. Sets are the bits of an integer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, NamedTuple

from rankscope.models.view import Carry
from rankscope.pass_graph.ir import Edge, Graph, Node, Value
from rankscope.pass_graph.replay import SharedMemory
from rankscope.stream.maps import Map, map_of


class _Sets(NamedTuple):
    """How a value depends on the points, one set per kind of dependence.

    Attributes:
        carried: contains the point itself, up to views, norms, gains and elementwise functions.
        linear: contains the point, transformed by constant matrices at most.
        reached: contains something computed from the point.
        bent: contains something computed from the point through attention or an activation.
    """

    carried: int = 0
    linear: int = 0
    reached: int = 0
    bent: int = 0

    def __or__(self, other: Any) -> _Sets:
        return _Sets(*(a | b for a, b in zip(self, other, strict=True)))

    @property
    def all(self) -> int:
        return self.carried | self.linear | self.reached | self.bent


_NOTHING = _Sets()


@dataclass(frozen=True)
class KnownCall:
    """A module call that contains blocks.

    Attributes:
        stack: number of its stack.
        first: number of its first block.
        last: number of its last block.
        adds: block of each add onto its stream, and whether surgery applies its gain to the stream there.
        inside: those of its adds that are a part of a branch, as a mean over tokens that is subtracted.
    """

    stack: int
    first: int
    last: int
    adds: tuple[tuple[int, bool], ...]
    inside: frozenset[int] = frozenset()


@dataclass
class _Meeting:
    """An operation that combines points with something computed from them."""

    points: int
    module: str
    operation: str
    at: Mapping[int, int]
    """The current block of each stack, or the last one that ran."""


@dataclass
class _Replay:
    calls: Mapping[int, KnownCall]
    sets: dict[Value, _Sets] = field(default_factory=dict)
    statistics: set[Value] = field(default_factory=set)
    derived: set[Value] = field(default_factory=set)
    """Values that depend on the input in the original pass, without removing any skip."""
    layer_of: dict[int, dict[int, int]] = field(default_factory=dict)
    """For each stack, the first block whose stream contained each point."""
    entered: int = 0
    """Points that entered a block, and did not only come out of a sum inside one."""
    reached: dict[int, int] = field(default_factory=dict)
    open: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    """For each active block call: points it received unchanged, or through matrices, and the axes of its tokens."""
    cuts: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)
    """For each removed skip: the points of its stream, and those its branch was computed from."""
    beside: dict[Value, tuple[int, list[_Sets]]] = field(default_factory=dict)
    """For values that hold others side by side along another axis than the last: its length, and the others."""
    met: list[_Meeting] = field(default_factory=list)
    gated: list[_Meeting] = field(default_factory=list)
    normed: list[_Meeting] = field(default_factory=list)
    points: int = 0
    is_inside: bool = False
    """Whether the operation is a sum inside a branch, which takes nothing around it."""
    streams: int = 0
    """Points that were the stream at the entry of a block or at one of its sums."""

    def new_point(self) -> int:
        self.points += 1
        return 1 << self.points

    def of(self, values: Iterable[Value]) -> list[_Sets]:
        return [sets for value in values if (sets := self.sets.get(value)) is not None]

    def run(self, graph: Graph) -> None:
        for value in graph.inputs:
            point = self.new_point()
            self.sets[value] = _Sets(point, point)
            self.derived.add(value)
        for event in graph.events:
            if isinstance(event, Node):
                self._apply(event)
            elif event.call.number is not None and event.call.number in self.calls:
                self._cross(event, self.calls[event.call.number])

    def _cross(self, edge: Edge, call: KnownCall) -> None:
        value = edge.call.taken if edge.begins else edge.call.returned
        sets = _NOTHING if value is None else self.sets.get(value, _NOTHING)
        if edge.begins:
            # A constant matrix before the block (an adapter, projected embeddings) still yields the stream.
            self._enter(call.stack, call.first, sets.carried | sets.linear)
            self.entered |= sets.carried | sets.linear
            self.streams |= sets.carried
            tokens = () if value is None else tuple(value.shape[:-1])
            self.open.append((sets.carried, sets.carried | sets.linear, tokens))
            return
        entry, _, _ = self.open.pop()
        if entry and value not in self.derived:
            # The output does not depend on the input as far as recorded: it was computed where no operation is visible.
            self.met.append(_Meeting(entry, edge.call.name, "a kernel that cannot be followed", dict(self.reached)))
        through = entry & sets.carried & sets.reached
        if through:
            # The product of the stream and a gate is not a sum, but a block that returns it passes the stream on.
            gate = next((meeting for meeting in reversed(self.gated) if meeting.points & through), None)
            if gate is not None:
                self.met.append(replace(gate, points=through, at=dict(self.reached)))

    def _enter(self, stack: int, layer: int, carried: int) -> None:
        self.reached[stack] = layer
        # A point keeps the first block it entered, so that a meeting can say which blocks it bypasses.
        layer_of = self.layer_of.setdefault(stack, {})
        for point in _bits(carried):
            if not point & self.entered:
                layer_of[point] = layer

    def _apply(self, node: Node) -> None:
        # Removing a skip means that its sum no longer receives the stream: leave that operand out.
        adds = () if node.function is None else node.function.adds
        cut = [(self.calls[call], position, _as_given(added[0], node)) for call, position, added in adds
               if call in self.calls]  # fmt: skip
        dropped = {stream for call, position, stream in cut if call.adds[position][1]}
        self.is_inside = any(position in call.inside for call, position, _ in cut)
        op = map_of(node)
        carried = self.of(value for value in op.carried if value not in dropped)
        read = self.of(value for value in op.read if value not in dropped)
        self._follow_beside(node, op, carried)
        # A write may have changed only a part of a tensor in the same memory: its old content stays too.
        is_shared = isinstance(node.run, SharedMemory)
        sets = _union(carried) if is_shared else self._result(node, op, carried, read)
        if op.is_statistic or (op.kind in ("carries", "bends") and self._is_statistic(op)):
            self.statistics |= set(node.outputs)
        elif op.kind == "scales" and not op.in_norm and self._is_statistic(op, some=True) and sets.carried:
            self.normed.append(_Meeting(sets.carried, node.module, node.written_as, dict(self.reached)))
        # Tracked without removing skips: the output of a block must depend on its input in the pass that really ran.
        if not self.derived.isdisjoint((*op.carried, *op.read)):
            self.derived.update(node.outputs)
        for value in node.outputs:
            self.sets[value] = sets
        for call, position, stream in cut:
            layer, is_cut = call.adds[position]
            self.streams |= sets.carried
            if is_cut:
                self._enter(call.stack, layer, sets.carried)
                key = (call.stack, call.first, position)
                carried_by, reached_by = self.cuts.get(key, (0, 0))
                own = self.sets.get(stream, _NOTHING).carried
                self.cuts[key] = carried_by | own, reached_by | sets.reached | sets.bent & ~sets.linear

    def _follow_beside(self, node: Node, op: Map, carried: list[_Sets]) -> None:
        """Note a sum over channels that lie along another axis than the last, such as a convolution's.

        Values side by side along the tokens are summed over by no map of their channels. Axes are told apart by their
        length alone: an equal number of tokens and channels can only find too much.
        """
        if op.beside:
            beside = op.beside, carried
        else:
            known = [self.beside[value] for value in op.carried if value in self.beside]
            for length, parts in known if op.contracts else ():
                if length == op.contracts:
                    for one, other in permutations(parts, 2):
                        self._note(one.carried & other.reached, node, self.met)
            if not known or op.contracts or op.kind == "mixes":
                return
            beside = known[0]
        self.beside.update(dict.fromkeys(node.outputs, beside))

    def _is_statistic(self, op: Map, *, some: bool = False) -> bool:
        values = [value for value in (*op.carried, *op.read) if self.sets.get(value, _NOTHING).all]
        flags = [value in self.statistics for value in values]
        return any(flags) and not all(flags) if some else bool(flags) and all(flags)

    def _result(self, node: Node, op: Map, carried: list[_Sets], read: list[_Sets]) -> _Sets:
        if op.kind == "matrix":
            return self._product(node, op, carried, read)
        union, steering = _union(carried), _union(read).all
        # An output that is only controlled by points (a mask, an index) is computed from them but carries none.
        if not union.all:
            return _NOTHING if not steering else _Sets(0, 0, steering, steering)
        # Mixing tokens transforms everything: the output is a new point, computed from all points of the inputs.
        if op.kind == "mixes":
            self._meet_inside(node, op, carried)
            if node.is_foreign:  # a custom kernel may be a fused sum
                self._meet(node, op, carried, gates=False)
            point = self.new_point()
            return _Sets(point, point, union.all | steering, union.all | steering)
        self._meet(node, op, carried, gates=op.kind == "scales")
        # x * rsqrt(mean(x²)) is a norm, which counts as linear here; any other computed factor is a gate.
        is_norm = op.in_norm or self._is_statistic(op, some=True)
        gates = op.kind == "scales" and (len(carried) > 1 or bool(steering)) and not is_norm
        linear = 0 if gates or op.kind == "bends" else union.linear
        bent = union.bent | steering | (union.linear & ~linear)
        return _Sets(union.carried, linear, union.reached | steering, bent)

    def _product(self, node: Node, op: Map, factors: list[_Sets], added: list[_Sets]) -> _Sets:
        """A matrix product, and what is added to it in the same call."""
        known = [factor for factor in factors if factor.all]
        total = _union(factors)
        result = _NOTHING
        if known:
            point = self.new_point()
            # One factor that depends on the input, and a constant matrix: a projection, which keeps ``linear``. Two
            # factors that depend on the input: attention scores or a weighted sum of values, which bend everything.
            if len(known) == 1:
                if self.sets.get(op.carried[-1], _NOTHING).all and len(op.carried) > 1:
                    self._meet_inside(node, op, known)  # a constant matrix from the left sums over rows
                result = _Sets(point, point | total.linear, total.all, total.bent)
            else:
                result = _Sets(point, point, total.all, total.all)
        if added:
            self._meet(node, op, [*added, result], gates=False)
            result = result | _union(added)
        return result

    def _meet_inside(self, node: Node, op: Map, given: list[_Sets]) -> None:
        """Note a sum over streams that are stored side by side."""
        for sets in given:
            if op.reduces or op.kind == "matrix":
                self._note(sets.carried & sets.reached, node, self.met)

    def _meet(self, node: Node, op: Map, given: list[_Sets], *, gates: bool) -> None:
        # A skip: one operand carries a point from which another operand was computed, by a matrix or by tokens that
        # are mixed (reached), or entry by entry through an activation (bent).
        for one, other in permutations(given, 2):
            points = one.carried & other.reached
            if not any(value in self.statistics for value in op.carried):
                # An activation may be such a sum as well, but not of the stream: x + alpha x^2 of what a matrix made.
                points |= self.streams & one.carried & one.linear & other.bent & ~other.linear
            if op.merges and not gates:
                self._note(points | self._projected(node, one, other), node, self.met)
            else:
                self._note(points, node, self.gated)

    def _projected(self, node: Node, one: _Sets, other: _Sets) -> int:
        """Points that arrive through constant matrices only, in a sum with something computed from them.

        Attention scores with positions are such sums too, so only sums with the shape of the stream count, or points
        from an earlier block.
        """
        points = 0 if one.carried & other.carried else one.linear & ~one.carried & other.bent
        if not points or not self.open:
            return points
        _, entry, tokens = self.open[-1]
        return points if node.outputs[0].shape[:-1] == tokens else points & ~entry

    def _note(self, points: int, node: Node, where: list[_Meeting]) -> None:
        if points and not self.is_inside:
            where.append(_Meeting(points, node.module, node.written_as, dict(self.reached)))


def _as_given(stream: Value, node: Node) -> Value:
    """The stream as an operation is given it: itself, or the cast that autocast puts in its place."""
    if stream in node.inputs:
        return stream
    made = [(value, value.node) for value in node.inputs]
    return next((value for value, by in made if by and by.name == "_to_copy" and stream in by.inputs), stream)


def _union(given: Iterable[_Sets]) -> _Sets:
    total = _NOTHING
    for sets in given:
        total = total | sets
    return total


def _bits(mask: int) -> Iterable[int]:
    while mask:
        lowest = mask & -mask  # the lowest set bit
        yield lowest
        mask ^= lowest


@dataclass(frozen=True)
class CarriesFound:
    """The result of the replay.

    Attributes:
        carries: for each stack, what carries it around its blocks in addition to the known skips.
        norms: for each stack, the norms that are written out in it.
        all_true: whether in every known skip the branch was computed from the stream, by more than a statistic.
    """

    carries: list[list[Carry]]
    norms: list[list[Carry]]
    all_true: bool


def carries_of(graph: Graph, calls: Mapping[int, KnownCall], stacks: int) -> CarriesFound:
    """Replay a recorded pass with the skips of these calls removed."""
    replay = _Replay(calls)
    replay.run(graph)
    norms = _located(replay, replay.normed, stacks, inside=True)
    return CarriesFound(
        _located(replay, replay.met, stacks), norms, all(own & branch for own, branch in replay.cuts.values())
    )


def long_skips_of(graph: Graph, key: int, found: Sequence[tuple[int, int, int]]) -> list[Carry]:
    """The long skips of one stack, from what was noted of each: the blocks it goes around, and the calls begun."""
    nodes = {add: node for node in graph.nodes if node.function for call, add, _ in node.function.adds if call == key}
    return [
        Carry(nodes[number].module, nodes[number].written_as, first, last, calls_begun)
        for number, (first, last, calls_begun) in enumerate(found)
    ]


def _located(replay: _Replay, met: list[_Meeting], stacks: int, *, inside: bool = False) -> list[list[Carry]]:
    carries: list[dict[tuple[str, str], Carry]] = [{} for _ in range(stacks)]
    for meeting in met:
        for stack, layer_of in replay.layer_of.items():
            if stack not in meeting.at:
                continue
            layers = [layer_of[point] for point in _bits(meeting.points) if point in layer_of]
            if not layers:
                continue
            first, last = min(layers), meeting.at[stack]
            first = last if inside else min(first, last)
            key = (meeting.module, meeting.operation)
            known = carries[stack].get(key)
            if known is not None:
                first, last = min(first, known.first), max(last, known.last)
            carries[stack][key] = Carry(*key, first, last)
    return [list(each.values()) for each in carries]
