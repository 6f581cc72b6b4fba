"""A decomposition read by length: shares, residuals, and a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope.runs.curves import USABLE
from rankscope.runs.rows import only
from rankscope.runs.summary import stacks_of
from rankscope.verdicts import Verdict
from rankscope.views import number

SHARE = "projection_share"
HALF = 0.5


@dataclass(frozen=True, eq=False)
class ByLength:
    """One metric over path lengths at one place, averaged over sequences; NaN where nothing is usable."""

    metric: str
    lengths: NDArray[np.int64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def last_place(table: pa.Table, stack: str | None) -> tuple[str, int]:
    """Site and block at which the end of a stack was read."""
    rows = only(table, paths="of a length", stack=stack)
    sites = rows["site"].unique().to_pylist()
    site = "final" if "final" in sites else "block.out"
    return site, int(pc.max(only(rows, site=site)["layer"]).as_py())


def by_length(
    table: pa.Table, metric: str, stack: str | None = None, *, layer: int | None = None, origin: str | None = None
) -> ByLength:
    """A metric of the sums of paths of each length, at the end of the stack or at the output of a block."""
    site, last = last_place(table, stack) if layer is None else ("block.out", layer)
    rows = only(table, metric=metric, paths="of a length", stack=stack, site=site, layer=last, origin=origin)
    rows = rows.filter(pc.is_in(rows["status"].cast(pa.string()), pa.array(USABLE)))
    lengths, values = rows["length"].to_numpy(), rows["value"].to_numpy()
    known = np.unique(lengths)
    groups = [values[lengths == length] for length in known]
    band = [np.quantile(group, (0.1, 0.9)) for group in groups]
    return ByLength(
        metric,
        known.astype(np.int64),
        np.array([group.mean() for group in groups]),
        np.array([low for low, _ in band]),
        np.array([high for _, high in band]),
    )


def through_heads(table: pa.Table, metric: str, stack: str | None = None) -> NDArray[np.float64]:
    """A metric of all paths through each head, (blocks, heads), averaged over sequences."""
    rows = only(table, metric=metric, paths="through a head", stack=stack)
    layers, heads, values = (rows[name].to_numpy() for name in ("layer", "head", "value"))
    if not values.size:
        return np.empty((0, 0))
    grid = np.full((layers.max() + 1, heads.max() + 1), np.nan)
    for layer in np.unique(layers):
        for head in np.unique(heads[layers == layer]):
            grid[layer, head] = values[(layers == layer) & (heads == head)].mean()
    return grid


def judge_decomposition(table: pa.Table, sum_error: float) -> Verdict:
    """One sentence per stack: the lengths that make up half of the output, and whether the sum is the forward pass."""
    sentences, evidence = [], []
    for stack in stacks_of(table):
        shares = by_length(table, SHARE, stack)
        sentences.append((f"{stack}: " if stack else "") + _sentence(shares))
        evidence += [
            {"metric": SHARE, "stack": stack, "length": int(length), "value": float(value)}
            for length, value in zip(shares.lengths, shares.mean, strict=True)
        ]
    words = f"{' '.join(sentences)} The sum over all lengths equals the forward pass to {number(sum_error)}."
    return Verdict(words, tuple(evidence), None)


def _sentence(shares: ByLength) -> str:
    reached = np.cumsum(shares.mean)
    half = int(np.argmax(reached >= HALF)) if (reached >= HALF).any() else len(reached) - 1
    top = int(np.argmax(shares.mean))
    length = int(shares.lengths[half])
    paths = f"Paths of length {length} or less" if length else "Paths past all attention (length 0)"
    words = f"{paths} carry {number(float(reached[half]))} of the output."
    if top == half == 0:
        return words
    return f"{words} Length {int(shares.lengths[top])} carries most: {number(float(shares.mean[top]))}."


def columns_shown(table: pa.Table) -> Iterator[str]:
    """Metrics that were taken by length, in order."""
    yield from dict.fromkeys(only(table, paths="of a length")["metric"].to_pylist())
