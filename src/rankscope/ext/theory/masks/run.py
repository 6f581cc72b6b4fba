"""``graph``: what the graph of a mask says about collapse, at any length."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import InputError
from rankscope.ext.theory.graphs.bracket import Bracket
from rankscope.ext.theory.graphs.connectivity import connectivity
from rankscope.ext.theory.graphs.distances import NO_CENTRE, NOT_STRONG, radius_and_diameter
from rankscope.ext.theory.graphs.intervals import Intervals, component_of, eccentricities, intervals_of
from rankscope.ext.theory.graphs.mixing import Decay, followed, layers_to_agree, transient_layers
from rankscope.ext.theory.graphs.second_eigenvalue import (
    SecondEigenvalue,
    equal_after,
    second_eigenvalue,
    second_eigenvalue_of_intervals,
)
from rankscope.ext.theory.masks import GRAPH
from rankscope.ext.theory.masks.facts import AGREEMENT_KEY, MaskGraph, MaskGraphs
from rankscope.masks import MASKS, Mask, parse_mask
from rankscope.masks._edges import EDGE_LIMIT, Progressions
from rankscope.masks._spec import NamedMask
from rankscope.verbs.calling import checked

FEATURES = 1 << 14
"""Maximal size of the random tokens in all; each has at least two and at most sixteen features."""
WORK = 1 << 28
"""Budget of the simulation, in products of a pair and a feature; takes a few seconds."""
MOST_LAYERS = 20_000
FALLEN_APART = 64
"""Number of layers simulated if tokens are known never to agree."""
SHOWN_CENTRES = 8
SMALLER = (512, 1024, 2048)
"""Lengths from which to extrapolate, if a longer sequence was not simulated until tokens agree."""
LARGEST_PARAMETER = SMALLER[0] // 8
"""Widths and counts above this may act at the asked length otherwise than at the smaller ones."""
MOST_DRIFT = 0.05
"""Largest change of the power of the length from one doubling to the next at which it is extrapolated."""
Floats = NDArray[np.float64]
GRAPH_FILES = {".npy", ".npz", ".txt"}


@checked(*(option for option in GRAPH.options if option.in_python))
def graph(mask: Mask | str | Path, tokens: int | None = None, *, seed: int = 0) -> MaskGraph:
    r"""Centres, radius, diameter, second eigenvalue and transient of a mask, and how fast random tokens agree under it.

    Attention is uniform over the visible tokens, as it is at collapse. Above a few hundred tokens no square matrix is
    formed: windows, causal masks and prefixes are handled as intervals, other masks as sparse matrices.

    Args:
        mask: a mask, an expression such as ``"causal_window(4) | sink(1)"``, or the path of a graph file.
        tokens: number of tokens; optional for a graph file, which has its own.
        seed: of the random tokens.

    Raises:
        InputError: a token sees nothing, or the mask has too many pairs to list and no structure to exploit.
        MissingExtraError: scipy is not installed.

    Example:
        >>> found = graph("causal", 10**6)
        >>> found.lambda_2, found.radius, found.centres, found.strongly_connected
        (0.5, 1, 1, False)
    """
    chosen, tokens = _chosen(mask, tokens)
    facts = _facts(chosen, tokens, seed)
    if facts.layers_to_agreement is None and AGREEMENT_KEY in facts.ranges and tokens >= 4 * SMALLER[-1]:
        facts = _with_extrapolation(facts, chosen, seed)
    return facts


def compared(rankscope: Any, options: Mapping[str, Any]) -> MaskGraphs:
    """The masks named on the command line."""
    return MaskGraphs(rankscope.graph(mask, options["tokens"], seed=options["seed"]) for mask in options["masks"])


def _chosen(mask: Mask | str | Path, tokens: int | None) -> tuple[Mask, int]:
    if isinstance(mask, (str, Path)) and Path(mask).suffix.lower() in GRAPH_FILES:
        mask = MASKS["adjacency"](str(mask))
    chosen = parse_mask(str(mask)) if not isinstance(mask, Mask) else mask
    if tokens is None:
        if not isinstance(chosen, NamedMask) or chosen.name != "adjacency":
            raise InputError(f"'{chosen}' has no length of its own. Give tokens, e.g. 128 (--tokens 128).")
        tokens = _own_length(chosen)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 2:
        raise InputError(f"tokens={tokens!r}: expected a whole number, 2 or more.")
    return chosen, tokens


def _own_length(graph: NamedMask) -> int:
    from rankscope.masks.adjacency import tokens_of

    return tokens_of(str(dict(graph.parameters)["source"]))


def _facts(mask: Mask, tokens: int, seed: int) -> MaskGraph:
    intervals = _intervals(mask, tokens)
    if intervals is not None:
        return _of_intervals(mask, intervals, seed)
    sees = mask.sparse(tokens)
    how = connectivity(sees)
    radius, diameter = radius_and_diameter(sees, how)
    second = second_eigenvalue(sees, how)
    diagonal = sees.diagonal()
    alone = np.flatnonzero(diagonal & (np.diff(sees.indptr) == 1))
    anchor = int(alone[0]) if len(alone) else None
    decay = _decay(_uniform(sees), tokens, sees.nnz, anchor, second, seed)
    return _graph(
        mask,
        tokens,
        int(sees.nnz),
        bool(diagonal.all()),
        how.centres,
        how.parts,
        radius,
        diameter,
        second,
        decay,
        _equal_after(sees, second),
    )


def _intervals(mask: Mask, tokens: int) -> Intervals | None:
    if not isinstance(mask, NamedMask):
        return None
    edges = mask.edges(tokens)
    return intervals_of(edges.start, edges.stop) if isinstance(edges, Progressions) else None


def _of_intervals(mask: Mask, graph: Intervals, seed: int) -> MaskGraph:
    reach = eccentricities(graph)
    centres = np.flatnonzero(np.isfinite(reach))
    parts = int(component_of(graph)[-1]) + 1
    radius = Bracket.exactly(
        float(reach[centres].min()) if len(centres) else math.inf, "exact" if len(centres) else NO_CENTRE
    )
    diameter = Bracket.exactly(float(reach.max()), "exact" if parts == 1 else NOT_STRONG)
    sees = mask.sparse(graph.tokens) if graph.edges <= EDGE_LIMIT // 2 else None
    second = second_eigenvalue_of_intervals(graph, listed=sees is not None)
    if second is None:
        sees = mask.sparse(graph.tokens) if sees is None else sees
        second = second_eigenvalue(sees, connectivity(sees))
    anchor = 0 if graph.lengths[0] == 1 else None
    apply = graph.mean_over_seen if sees is None else _uniform(sees)
    decay = _decay(
        apply, graph.tokens, min(graph.edges, 8 * graph.tokens) if sees is None else graph.edges, anchor, second, seed
    )
    # A token that sees itself and others keeps a share of its own value, so all can become equal only in one step.
    equal = 1 if second.modulus.value == 0 else None
    return _graph(mask, graph.tokens, graph.edges, True, centres, parts, radius, diameter, second, decay, equal)


def _equal_after(sees: Any, second: SecondEigenvalue) -> int | None:
    """Computed if the second eigenvalue is 0 and it takes no longer than the simulation."""
    if second.modulus.value != 0:
        return None
    return equal_after(sees, min(sees.shape[0], max(8, WORK // (8 * int(sees.nnz)))))


def _uniform(sees: Any) -> Callable[[Floats], Floats]:
    P = sees.astype(np.float64).multiply(1.0 / np.diff(sees.indptr)[:, None]).tocsr()
    return lambda x: P @ x


def _decay(
    apply: Callable[[Floats], Floats], tokens: int, work: int, anchor: int | None, second: SecondEigenvalue, seed: int
) -> Decay:
    features = min(16, max(2, FEATURES // tokens))
    start = np.random.default_rng(seed).standard_normal((tokens, features))
    most = FALLEN_APART if second.gap == 0 else MOST_LAYERS
    layers = max(8, min(most, WORK // (work * features)))
    return followed(apply, start, anchor, 1 - second.gap, layers)


def _graph(
    mask: Mask,
    tokens: int,
    edges: int,
    self_loops: bool,
    centres: NDArray[np.int64],
    parts: int,
    radius: Bracket,
    diameter: Bracket,
    second: SecondEigenvalue,
    decay: Decay,
    equal: int | None,
) -> MaskGraph:
    brackets = {
        "radius": radius,
        "diameter": diameter,
        "lambda_2": second.modulus,
        "transient": transient_layers(decay, second),
        AGREEMENT_KEY: layers_to_agree(decay, second),
    }
    known = {name: bracket.value for name, bracket in brackets.items()}
    whole = {name: None if value is None else int(value) for name, value in known.items() if name != "lambda_2"}
    open_ends = {
        name: tuple(bracket.to_json()[end] for end in ("lower", "upper"))
        for name, bracket in brackets.items()
        if not bracket.is_known
    }
    return MaskGraph(
        mask=str(mask),
        tokens=tokens,
        edges=edges,
        self_loops=self_loops,
        centres=len(centres),
        first_centres=tuple(int(c) for c in centres[:SHOWN_CENTRES]),
        parts=parts,
        strongly_connected=parts == 1,
        quasi_strongly_connected=len(centres) > 0,
        radius=whole["radius"],
        diameter=whole["diameter"],
        lambda_2=None if known["lambda_2"] is None or math.isnan(known["lambda_2"]) else known["lambda_2"],
        spectral_gap=None if math.isnan(second.gap) else second.gap,
        transient=whole["transient"],
        layers_to_agreement=whole[AGREEMENT_KEY],
        log10_decay=tuple(float(v) for v in decay.log10_relative),
        ranges=open_ends,
        statuses={name: bracket.status for name, bracket in brackets.items()},
        equal_after=equal,
    )


def _with_extrapolation(graph: MaskGraph, mask: Mask, seed: int) -> MaskGraph:
    r"""A note with an interval from three shorter sequences; not for a graph file, which has only its own length.

    **Heuristic.** The layers grow as a power of the length that still drifts: for a causal window as
    :math:`an + b\sqrt n`, whose power approaches 1 and whose change shrinks by :math:`\sqrt 2` with each doubling, so
    that 2.4 times the last change is still to come. The interval goes from one change back to three changes ahead.
    """
    numbers = [int(number) for number in re.findall(r"\d+", str(mask))]
    if "adjacency" in str(mask) or max(numbers, default=0) > LARGEST_PARAMETER:
        return graph
    small = [_facts(mask, tokens, seed).layers_to_agreement or 0 for tokens in SMALLER]
    if min(small) < 1:
        return graph
    before, power = (math.log2(longer / shorter) for shorter, longer in pairwise(small))
    drift, doublings = power - before, math.log2(graph.tokens / SMALLER[-1])
    low, high = sorted(small[-1] * 2 ** (doublings * (power + steps * drift)) for steps in (-1, 3))
    if abs(drift) > MOST_DRIFT or high < len(graph.log10_decay):
        return graph
    measured = ", ".join(f"{layers:,} at {tokens:,}" for layers, tokens in zip(small, SMALLER, strict=True))
    words = (
        f"tokens agreed after {measured} tokens. Extrapolated to {graph.tokens:,} tokens: {low:,.0f} to {high:,.0f} "
        "layers, an estimate and not a bound."
    )
    return replace(graph, notes=(*graph.notes, words))
