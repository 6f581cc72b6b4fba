"""``graph``: what the graph of a mask says about collapse, at any length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.errors import InputError
from rankscope.ext.theory.graphs.connectivity import connectivity
from rankscope.ext.theory.graphs.distances import radius_and_diameter
from rankscope.ext.theory.graphs.mixing import Decay, followed, layers_to_agree, transient_layers
from rankscope.ext.theory.graphs.second_eigenvalue import (
    SecondEigenvalue,
    equal_after,
    second_eigenvalue,
    uniform_over,
)
from rankscope.ext.theory.masks import GRAPH
from rankscope.ext.theory.masks.facts import AGREEMENT_KEY, MaskGraph, MaskGraphs
from rankscope.masks import MASKS, Mask, parse_mask
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
GRAPH_FILES = {".npy", ".npz"}


@checked(*(option for option in GRAPH.options if option.in_python))
def graph(mask: Mask | str | Path, tokens: int | None = None, *, seed: int = 0) -> MaskGraph:
    r"""Centres, radius, diameter, second eigenvalue and transient of a mask, and how fast random tokens agree under it.

    Attention is uniform over the visible tokens, as it is at collapse. Above a few hundred tokens no square matrix is
    formed: the mask is a sparse matrix of at most 67 million pairs.

    Args:
        mask: a mask, an expression such as ``"causal_window(4) | sink(1)"``, or the path of a graph file.
        tokens: number of tokens; optional for a graph file, which has its own.
        seed: of the random tokens.

    Raises:
        InputError: a token sees nothing, or the mask has too many pairs to list.

    Example:
        >>> found = graph("causal", 1000)
        >>> found.lambda_2, found.radius, found.centres, found.strongly_connected
        (0.5, 1, 1, False)
    """
    chosen, tokens = _chosen(mask, tokens)
    return _facts(chosen, tokens, seed)


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
    sees = mask.sparse(tokens)
    pairs = int(sees.nnz)
    how = connectivity(sees)
    radius, diameter = radius_and_diameter(sees, how)
    second = second_eigenvalue(sees, how)
    decay = _decay(sees, second, seed)
    # computed if the second eigenvalue is 0, and if it takes no longer than the simulation
    most = min(tokens, max(8, WORK // (8 * pairs)))
    equal = equal_after(sees, most) if second.modulus.value == 0 else None
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
        edges=pairs,
        self_loops=bool(sees.diagonal().all()),
        centres=len(how.centres),
        first_centres=tuple(int(c) for c in how.centres[:SHOWN_CENTRES]),
        parts=how.parts,
        strongly_connected=how.is_strong,
        quasi_strongly_connected=how.is_quasi_strong,
        radius=whole["radius"],
        diameter=whole["diameter"],
        lambda_2=known["lambda_2"],
        spectral_gap=None if math.isnan(second.gap) else second.gap,
        transient=whole["transient"],
        layers_to_agreement=whole[AGREEMENT_KEY],
        log10_decay=tuple(float(v) for v in decay.log10_relative),
        ranges=open_ends,
        statuses={name: bracket.status for name, bracket in brackets.items()},
        equal_after=equal,
    )


def _decay(sees: Any, second: SecondEigenvalue, seed: int) -> Decay:
    """Random tokens under the mask, for as many layers as the budget allows."""
    tokens = sees.shape[0]
    features = min(16, max(2, FEATURES // tokens))
    start = np.random.default_rng(seed).standard_normal((tokens, features))
    most = FALLEN_APART if second.gap == 0 else MOST_LAYERS
    layers = max(8, min(most, WORK // (int(sees.nnz) * features)))
    # relative to a token that sees only itself, no mean has to be subtracted
    alone = np.flatnonzero(sees.diagonal() & (np.diff(sees.indptr) == 1))
    P = uniform_over(sees)
    return followed(lambda x: P @ x, start, int(alone[0]) if len(alone) else None, 1 - second.gap, layers)
