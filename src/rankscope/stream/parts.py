"""What the branches of a block consist of: which norms end them, and which weights mix tokens.

Read from the recorded operations of one call of a block. In ``x = x + norm2(attention(norm1(x)))`` the block's own
norms are ``norm2``, from which the branch follows as it is, and ``norm1``, which reads the stream as it is. Those of
queries and keys, between products with weights, are a part of what mixes tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence

from rankscope.models.view import BranchParts, Label
from rankscope.pass_graph.ir import Call, Node, Value, way_back
from rankscope.stream.operators import ADDS, DIFFERENCES, DIVISIONS, MOVES, MULTIPLICATIONS, NEGATIONS, NORMS

_KEEPING = ADDS | DIFFERENCES | MULTIPLICATIONS | DIVISIONS | NEGATIONS | MOVES
_UNNAMED = frozenset({"mul", "neg", "shared memory", "_to_copy", "clone", "expand"})
"""Operations of rankscope itself, and of memory, which no function of the author has called."""


def parts_of(nodes: Sequence[Node], block: Call, labels: Sequence[Label | None]) -> BranchParts:
    """What the branches of one call of a block consist of.

    Args:
        nodes: what ran in it.
        block: the call.
        labels: those of its sums, in order; None for a sum that is no skip.
    """
    added = [
        (labels[add], values[-1])
        for node in nodes if node.function is not None
        for of, add, values in node.function.adds if of == block.number and add < len(labels)
    ]  # fmt: skip
    starts = {*block.stream, *block.sums.values(), *(() if block.taken is None else (block.taken,))}
    branches = [branch for label, branch in added if label is not None]
    norms = _norm_calls(nodes)
    ending = {norms[value.node] for value in _as_it_is(branches, norms) if value.node in norms}
    beginning = {norms[node] for node in norms if not starts.isdisjoint(_as_it_is(node.inputs, norms))}
    # One that the block itself calls is its own too, be it of what another stack gave it or after an unknown sum.
    direct = {norms[node] for node in norms if _is_direct(node, block)}
    weights = {
        node.call.name
        for label, branch in added if label not in ("mlp", None)
        for node in _operations(branch, starts)
        if node.call is not None and node.call is not block and any(value.is_weight for value in node.inputs)
    }  # fmt: skip
    own = ending | beginning | direct
    return BranchParts(frozenset(own), frozenset(norms.values()) - own, frozenset(weights))


def _norm_calls(nodes: Iterable[Node]) -> dict[Node, tuple[str, int]]:
    """For each operation of a norm, the module that was called, and how many calls of it came before.

    A norm function that is called outside of norm modules has no name: all of them are counted together.
    """
    found: dict[Node, tuple[str, int]] = {}
    known: dict[object, tuple[str, int]] = {}
    seen = Counter[str]()
    for node in nodes:
        norm = _outermost_norm(node.call)
        name = "" if norm is None else norm.name
        if norm is None and (node.function is None or node.function.func not in NORMS):
            continue
        key = id(node.function) if norm is None else norm
        if key not in known:
            known[key] = name, seen[name]
            seen[name] += 1
        found[node] = known[key]
    return found


def _outermost_norm(call: Call | None) -> Call | None:
    if call is None or not call.is_in_norm:
        return None
    while call.parent is not None and call.parent.is_in_norm:
        call = call.parent
    return call


def _is_direct(node: Node, block: Call) -> bool:
    """Whether a norm is a module of the block itself, or called by it."""
    norm = _outermost_norm(node.call)
    if norm is None:
        return node.call is block
    return norm.parent is block or norm.name.rpartition(".")[0] == block.name


def _as_it_is(values: Iterable[Value], norms: Container[Node | None]) -> Iterator[Value]:
    """These values, and those from which they follow without a matrix or an activation: by views, gains and sums."""

    def before(value: Value) -> Sequence[Value]:
        node = value.node
        if node is None or node in norms:
            return ()
        keeps = node.name in _UNNAMED if node.function is None else node.function.func in _KEEPING
        return node.inputs if keeps else ()

    return way_back(values, before)


def _operations(branch: Value, starts: set[Value]) -> set[Node]:
    """The operations from which a branch follows, since the stream."""
    values = way_back([branch], lambda value: () if value in starts or value.node is None else value.node.inputs)
    return {value.node for value in values if value.node is not None and value not in starts}
