"""Finds the places where a forward pass carries the residual stream around computations on it.

The operations of a pass are followed as if every skip known to surgery had been removed. If the stream from an earlier
point is still combined with something computed from it, that is a skip which surgery would leave in place: a long skip
between blocks, an input that is injected again, or a sum written in a form that is not recognised.

Each value has two sets of *points*. A point is what the model was given, or what a matrix, attention or an embedding
has made. A value *carries* the points that went into it by views, norms, gains and elementwise functions, and was
*computed from* those from which its own points were made. A skip shows up where one operand of a sum carries a point
from which the other was computed. Sets are the bits of an integer. What is found here in a block is proven, or not, by
``cuts``; between blocks nothing else looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, Literal, NamedTuple

import torch

from rankscope.models.view import Carry
from rankscope.pass_graph.ir import Edge, Graph, Node, Value
from rankscope.pass_graph.replay import SharedMemory
from rankscope.stream.operators import NORMS

Kind = Literal["carries", "beside", "scales", "bends", "reduces", "transforms"]

_CARRYING = {
    "_to_copy", "_unsafe_view", "_reshape_alias", "cat", "stack", "repeat", "roll", "flip", "rot90", "constant_pad_nd",
    "pad", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "index", "_unsafe_index", "index_select",
    "gather", "take_along_dim", "index_put", "_unsafe_index_put", "index_copy", "index_add", "index_fill", "scatter",
    "scatter_add", "scatter_reduce", "select_scatter", "slice_scatter", "diagonal_scatter", "as_strided_scatter",
    "masked_select", "masked_scatter", "copy", "native_layer_norm", "_fused_rms_norm", "rms_norm", "native_group_norm",
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
    "native_dropout", "avg_pool1d", "avg_pool2d", "_adaptive_avg_pool2d", "max_pool2d_with_indices",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_bicubic2d",
    "repeat_interleave", "tril", "triu", "resize_", "set_", "lift_fresh", "_conj", "view_as_real", "view_as_complex",
    "addcmul", "addcdiv", "split_with_sizes_copy", "unbind_copy", "bernoulli", "shared memory",
    "add", "sub", "rsub", "neg", "lerp", "where", "masked_fill", "clone", "positive",
    "hardswish", "prelu", "_prelu_kernel", "log_sigmoid_forward", "glu", "rrelu_with_noise", "floor_divide",
}  # fmt: skip
"""Operations that pass entries on, besides views and those that torch marks as elementwise."""
_LINEAR = {"add", "sub", "rsub", "neg", "lerp", "where", "masked_fill", "clone", "copy", "positive"}
_PRODUCTS = {"mul", "div", "true_divide"}
_STATISTICS = {
    "mean", "sum", "amax", "amin", "var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm", "prod",
}  # fmt: skip
_SORTED = {"max", "min", "topk", "sort", "median", "kthvalue", "logsumexp", "argmax", "argmin", "argsort"}
_MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "linear", "mv", "addmv", "matmul"}
_CONVOLUTIONS = {"convolution", "_convolution", "mkldnn_convolution"}
_ADDED_PRODUCTS = {"addmm", "baddbmm", "addbmm", "addmv"}
_CONDITIONED = {"where": 0, "masked_fill": 1, "masked_scatter": 1, "masked_select": 1}
"""Operations with an argument that only selects, and its position."""
_LAYERS = {torch.nn.functional.linear, torch.addmm}
"""Functions that are a product with a matrix, whatever they are executed as."""


class _Sets(NamedTuple):
    """How a value depends on the points.

    Attributes:
        carried: those that it contains, up to views, norms, gains and elementwise functions.
        linear: those that it contains, transformed by constant matrices at most.
        computed: those from which the points that it carries were made.
        bent: those of them from which they were made through attention or an activation.
    """

    carried: int = 0
    linear: int = 0
    computed: int = 0
    bent: int = 0

    @property
    def all(self) -> int:
        """Every point on which it depends."""
        return self.carried | self.linear | self.computed | self.bent


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


class _Meeting(NamedTuple):
    """An operation that combines points with something computed from them."""

    points: int
    module: str
    operation: str
    at: Mapping[int, int]
    """The current block of each stack, or the last one that ran."""


@dataclass(frozen=True)
class CarriesFound:
    """What was found.

    Attributes:
        carries: for each stack, what carries it around its blocks in addition to the known skips.
        norms: for each stack, the norms that are written out in it.
        all_true: whether in every known skip the branch was computed from the stream, by more than a statistic.
    """

    carries: list[list[Carry]]
    norms: list[list[Carry]]
    all_true: bool


def carries_of(graph: Graph, calls: Mapping[int, KnownCall], stacks: int) -> CarriesFound:
    """Follow a recorded pass with the skips of these calls removed."""
    follower = _Follower(calls)
    follower.run(graph)
    return CarriesFound(
        follower.located(follower.met, stacks),
        follower.located(follower.normed, stacks, inside=True),
        all(carried & computed for carried, computed in follower.cuts.values()),
    )


@dataclass
class _Follower:
    calls: Mapping[int, KnownCall]
    sets: dict[Value, _Sets] = field(default_factory=dict)
    statistics: set[Value] = field(default_factory=set)
    """One number per token, such as a mean over channels."""
    layer_of: dict[int, dict[int, int]] = field(default_factory=dict)
    """For each stack, the first block whose stream contained each point."""
    entered: int = 0
    """Points that entered a block, and did not only come out of a sum inside one."""
    streams: int = 0
    """Points that were the stream at the entry of a block or at one of its sums."""
    reached: dict[int, int] = field(default_factory=dict)
    """For each stack, the block that runs, or the last one that ran."""
    cuts: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)
    """For each removed skip: the points of its stream, and those its branch was computed from."""
    beside: dict[Value, tuple[int, Sequence[_Sets]]] = field(default_factory=dict)
    """For values that hold others side by side along another axis than the last: its length, and the others."""
    met: list[_Meeting] = field(default_factory=list)
    normed: list[_Meeting] = field(default_factory=list)
    points: int = 0
    open: list[tuple[int, Sequence[int]]] = field(default_factory=list)
    """For each running call with blocks: points that it was given, and the axes of its tokens."""

    def run(self, graph: Graph) -> None:
        """Follow all operations."""
        for value in graph.inputs:
            point = self._new_point()
            self.sets[value] = _Sets(point, point)
        for event in graph.events:
            if isinstance(event, Node):
                self._apply(event)
            elif event.call.number is not None and event.call.number in self.calls:
                self._cross(event, self.calls[event.call.number])

    def _new_point(self) -> int:
        self.points += 1
        return 1 << self.points

    def of(self, value: Value | None) -> _Sets:
        return _NOTHING if value is None else self.sets.get(value, _NOTHING)

    def _cross(self, edge: Edge, call: KnownCall) -> None:
        if edge.begins:
            # A constant matrix before the block (an adapter, projected embeddings) still yields the stream.
            taken, own = self.of(edge.call.taken), edge.call.taken
            self._enter(call.stack, call.first, taken.carried | taken.linear)
            self.entered |= taken.carried | taken.linear
            self.streams |= taken.carried
            self.open.append((taken.carried | taken.linear, () if own is None else own.shape[:-1]))
        else:
            self.open.pop()

    def _enter(self, stack: int, layer: int, carried: int) -> None:
        self.reached[stack] = layer
        # A point keeps the first block it entered, so that a meeting can say which blocks it bypasses.
        layer_of = self.layer_of.setdefault(stack, {})
        layer_of |= dict.fromkeys(_bits(carried & ~self.entered), layer)

    def _apply(self, node: Node) -> None:
        # Removing a skip means that its sum no longer receives the stream: leave that operand out.
        adds = () if node.function is None else node.function.adds
        cut = [(self.calls[call], add, _as_given(added[0], node)) for call, add, added in adds if call in self.calls]
        dropped = {stream for call, add, stream in cut if call.adds[add][1]}
        kind, carried, read = kind_of(node)
        factors = [self.of(value) for value in carried if value not in dropped]
        steering = _union(self.of(value) for value in read if value not in dropped)
        # What the operation makes of its operands, and which of these end up in the same entries.
        sets, terms = _union(factors), factors
        if kind == "transforms":
            sets, terms = self._transformed(node, factors), factors if node.is_foreign else []
            if node.name in _ADDED_PRODUCTS:  # c + a b
                terms, sets, steering = [sets, steering], _union([sets, steering]), _NOTHING
            elif node.name in _STATISTICS or self._is_from_left(node, carried):
                terms = [one for one in factors for _ in range(2)]  # a sum of what is side by side in one tensor
        # A norm that is written out multiplies the stream by a statistic of it.
        known = [value in self.statistics for value in (*carried, *read) if self.of(value) != _NOTHING]
        if kind == "reduces" or (kind != "transforms" and known and all(known)):
            self.statistics |= set(node.outputs)
        elif kind == "scales" and any(known) and not _is_in_norm(node):
            self._note(sets.carried, node, self.normed)
        # A product is no sum; one in a branch takes nothing around it; and memory that is shared is written in parts.
        is_inside = any(add in call.inside for call, add, _ in cut)
        if kind not in ("scales", "beside") and not is_inside and not isinstance(node.run, SharedMemory):
            for one, other in permutations(terms, 2):
                self._note(self._common(node, one, other, has_statistics=any(known)), node, self.met)
        self._follow_beside(node, kind, carried, factors)
        sets = self._steered(node, kind, factors, sets, steering)
        self.sets |= dict.fromkeys(node.outputs, sets)
        for call, add, stream in cut:
            layer, is_cut = call.adds[add]
            self.streams |= sets.carried
            if is_cut:
                self._enter(call.stack, layer, sets.carried)
                own, of_branch = self.cuts.get((call.stack, call.first, add), (0, 0))
                of_branch |= sets.computed | sets.bent & ~sets.linear
                self.cuts[call.stack, call.first, add] = own | self.of(stream).carried, of_branch

    def _common(self, node: Node, one: _Sets, other: _Sets, *, has_statistics: bool) -> int:
        """Points that one term of a sum carries, and from which the other was computed."""
        points = one.carried & other.computed
        if not has_statistics:  # or by an activation alone, if it is the stream: x + alpha x^2
            points |= self.streams & one.carried & one.linear & other.bent & ~other.linear
        # Or that arrive through constant matrices only. Attention scores with positions are such sums too, so only sums
        # with the shape of the stream count, or points from an earlier block.
        projected = 0 if one.carried & other.carried else one.linear & ~one.carried & other.bent
        if projected and self.open:
            given, tokens = self.open[-1]
            projected = projected if node.outputs[0].shape[:-1] == tokens else projected & ~given
        return points | projected

    def _follow_beside(self, node: Node, kind: Kind, carried: Sequence[Value], terms: Sequence[_Sets]) -> None:
        """Note a sum over channels that lie along another axis than the last, such as a convolution's.

        Values side by side along the tokens are summed over by no map of their channels. Axes are told apart by their
        length alone: an equal number of tokens and channels can only find too much.
        """
        if kind == "beside":
            axis = node.args[1] if len(node.args) > 1 else 0
            self.beside |= dict.fromkeys(node.outputs, (node.outputs[0].shape[axis], terms))
        for length, parts in [self.beside[value] for value in carried if value in self.beside]:
            if kind != "transforms":
                self.beside |= dict.fromkeys(node.outputs, (length, parts))
            elif length == _summed_over(node, carried):
                for one, other in permutations(parts, 2):
                    self._note(one.carried & other.computed, node, self.met)

    def _is_from_left(self, node: Node, factors: Sequence[Value]) -> bool:
        """Whether a constant matrix is multiplied from the left, so that it sums over rows."""
        is_known = [self.of(value) != _NOTHING for value in factors]
        return node.name in _MATRIX_PRODUCTS and is_known == [False, True]

    def _transformed(self, node: Node, factors: Sequence[_Sets]) -> _Sets:
        """A new point, computed from all others; a constant matrix keeps ``linear``, attention bends everything."""
        known = [one for one in factors if one != _NOTHING]
        if not known:
            return _NOTHING
        point, total = self._new_point(), _union(known)
        if node.name in (*_MATRIX_PRODUCTS, "index") and len(known) == 1:
            return _Sets(point, point | total.linear, total.all, total.bent)
        return _Sets(point, point, total.all, total.all)

    def _steered(self, node: Node, kind: Kind, terms: Sequence[_Sets], sets: _Sets, steering: _Sets) -> _Sets:
        """What gates, masks and activations make of it."""
        # x * rsqrt(mean(x^2)) is a norm, which counts as linear here; any other computed factor is a gate.
        is_norm = _is_in_norm(node) or any(value in self.statistics for value in node.inputs)
        is_gated = kind == "scales" and not is_norm and (len(terms) > 1 or steering != _NOTHING)
        linear = 0 if is_gated or kind == "bends" else sets.linear
        bent = sets.bent | steering.all | sets.linear & ~linear
        return _Sets(sets.carried, linear, sets.computed | steering.all, bent)

    def _note(self, points: int, node: Node, where: list[_Meeting]) -> None:
        if points:
            where.append(_Meeting(points, node.module, node.written_as, dict(self.reached)))

    def located(self, met: Iterable[_Meeting], stacks: int, *, inside: bool = False) -> list[list[Carry]]:
        """What was met, for each stack: the blocks that it goes around, or the block that it is in."""
        carries: list[dict[tuple[str, str], Carry]] = [{} for _ in range(stacks)]
        for meeting in met:
            for stack, layer_of in self.layer_of.items():
                layers = [layer_of[point] for point in _bits(meeting.points) if point in layer_of]
                if not layers or stack not in meeting.at:
                    continue
                last = meeting.at[stack]
                first = last if inside else min(*layers, last)
                key = (meeting.module, meeting.operation)
                known = carries[stack].get(key, Carry(*key, first, last))
                carries[stack][key] = Carry(*key, min(first, known.first), max(last, known.last))
        return [list(each.values()) for each in carries]


def long_skips_of(graph: Graph, key: int, found: Sequence[tuple[int, int, int]]) -> list[Carry]:
    """The long skips of one stack, from what was noted of each: the blocks it goes around, and the calls begun."""
    nodes = {add: node for node in graph.nodes if node.function for call, add, _ in node.function.adds if call == key}
    return [
        Carry(nodes[number].module, nodes[number].written_as, first, last, calls_begun)
        for number, (first, last, calls_begun) in enumerate(found)
    ]


def _as_given(stream: Value, node: Node) -> Value:
    """The stream as an operation is given it: itself, or the cast that autocast puts in its place."""
    if stream in node.inputs:
        return stream
    made = [(value, value.node) for value in node.inputs]
    return next((value for value, by in made if by and by.name == "_to_copy" and stream in by.inputs), stream)


def _union(given: Iterable[_Sets]) -> _Sets:
    total = _NOTHING
    for sets in given:
        total = _Sets(*(one | other for one, other in zip(total, sets, strict=True)))
    return total


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask  # the lowest set bit
        yield lowest
        mask ^= lowest


def kind_of(node: Node) -> tuple[Kind, tuple[Value, ...], tuple[Value, ...]]:
    """What an operation does to its inputs, which of them it passes on, and which only control it."""
    given, name = node.inputs, node.name
    content = tuple(value for value in given if value.dtype.is_floating_point or value.dtype.is_complex)
    chosen = tuple(value for value in given if value not in content)
    if node.is_opaque:
        return "transforms", content, chosen
    if name in _STATISTICS:  # over channels it is one number per token (a norm computes it); over tokens it mixes them
        return ("reduces" if _is_over_channels(node) else "transforms"), given, ()
    if name in _SORTED:
        is_last = name in ("topk", "sort") and len(node.args) < 3
        return ("bends" if is_last or _is_over_channels(node) else "transforms"), given, ()
    if name in _ADDED_PRODUCTS:  # addmm(c, a, b) = c + a b: the first argument is added, not multiplied
        return "transforms", given[1:], given[:1]
    if name in _PRODUCTS:  # a factor of the full shape is carried (the stream, or a gate of its size); others are gains
        carried = tuple(value for value in given if value.shape == node.outputs[0].shape)
        return "scales", carried, tuple(value for value in given if value not in carried)
    if name in _CONDITIONED:
        at = _CONDITIONED[name]
        return "carries", given[:at] + given[at + 1 :], given[at : at + 1]
    if name == "cat" and (node.args[1] if len(node.args) > 1 else 0) not in (-1, len(given[-1].shape) - 1):
        return "beside", given, ()
    # Weights that are not in memory are stood in for by a choice of channels.
    is_layer = name == "index" and node.function is not None and node.function.func in _LAYERS
    is_elementwise = node.operator is not None and torch.Tag.pointwise in node.operator.tags
    if is_layer or not (is_elementwise or name in _CARRYING or (node.operator is not None and node.operator.is_view)):
        return "transforms", given, ()
    if is_elementwise and name not in _LINEAR:
        return "bends", given, ()
    return "carries", content or given, chosen if content else ()  # indices only select


def _summed_over(node: Node, factors: Sequence[Value]) -> int:
    """Length of the axis over which a product with a matrix sums; channels come second in a convolution."""
    if node.name in _MATRIX_PRODUCTS:
        return factors[0].shape[-1]
    return factors[0].shape[1] if node.name in _CONVOLUTIONS else 0


def _is_over_channels(node: Node) -> bool:
    """Whether a sum, a mean, ... is over the last axis only."""
    given: Sequence[Any] = node.args[1:]
    dims = next((arg for arg in given if isinstance(arg, (list, tuple))), None)
    if dims is None:
        dims = [arg for arg in given if isinstance(arg, int) and not isinstance(arg, bool)][-1:]
    ndim = len(node.inputs[0].shape) if node.inputs else 0
    return ndim > 1 and len(dims) == 1 and dims[0] % ndim == ndim - 1


def _is_in_norm(node: Node) -> bool:
    known = node.function is not None and node.function.func in NORMS
    return known or (node.call is not None and node.call.is_in_norm)
