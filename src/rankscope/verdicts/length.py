"""What changes with the length of the inputs: a slope per block and metric, and the finding along this axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rankscope.runs.curves import cells, names_in
from rankscope.runs.intervals import mean_differences
from rankscope.runs.rows import of_stack, only
from rankscope.runs.summary import stacks_of
from rankscope.verdicts.axes import ALARMING, AxisFinding
from rankscope.verdicts.sentences import say, short
from rankscope.verdicts.states import TREND_FALL, State

LEVEL = 0.95
VARIANCE = "attention_output_variance"
"""Name of the variance of the attention output per token, which is derived from ``residual`` at ``attention.out``."""
SPREAD, STREAM = "relative_residual", "block.out"
EXPONENTS = (VARIANCE, SPREAD)
"""Metrics whose slope is the exponent of n. Sequences differ in size by a factor, which an exponent does not see."""


@dataclass(frozen=True)
class LengthSlope:
    r"""One metric at one block against the length of the inputs.

    **Estimate.** Per sequence the least-squares slope on :math:`\log_2 n`, so the change per doubling; then the mean
    over sequences with Student's interval. For :data:`EXPONENTS` the logarithm of the value is used, so the slope
    is the exponent :math:`p` of :math:`n^p`.
    """

    metric: str
    site: str
    stack: str | None
    layer: int
    means: tuple[float, ...]
    slope: float
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        """The entry of a run."""
        plain = {name: getattr(self, name) for name in ("metric", "site", "stack", "layer")}
        numbers = {name: _plain(getattr(self, name)) for name in ("slope", "low", "high")}
        means = [_plain(value) for value in self.means]
        return {**plain, "means": means, **numbers, "exponent": self.metric in EXPONENTS}


def lengths_in(table: pa.Table) -> list[int]:
    """The lengths of a run, ascending."""
    return sorted(int(length) for length in table["length"].unique().to_pylist())


def length_slopes(table: pa.Table, counted: Mapping[int, int]) -> list[LengthSlope]:
    """The slope of every metric at every block.

    Args:
        table: rows with a column ``length``.
        counted: number of measured tokens at each length.
    """
    lengths = lengths_in(table)
    slopes: list[LengthSlope] = []
    for stack in stacks_of(table):
        mine = of_stack(table, stack)
        for site in names_in(mine, "site"):
            here = only(mine, site=site)
            for metric in names_in(here, "metric"):
                layers, values = _grid(here, metric, site, lengths)
                slopes += _slopes(metric, site, stack, layers, values, lengths)
                if (metric, site) == ("residual", "attention.out"):
                    tokens = np.array([counted[length] for length in lengths], dtype=np.float64)
                    variance = values**2 / tokens[:, None, None]
                    slopes += _slopes(VARIANCE, site, stack, layers, variance, lengths)
    return slopes


def _grid(table: pa.Table, metric: str, site: str, lengths: Sequence[int]) -> tuple[list[int], NDArray[np.float64]]:
    """Values by length, layer and sequence, for layers and sequences that all lengths have."""
    grids = [cells(only(table, length=length), metric, site) for length in lengths]
    layers = sorted(set.intersection(*(set(grid.layers.tolist()) for grid in grids)))
    sequences = sorted(set.intersection(*(set(grid.sequences.tolist()) for grid in grids)))
    picked = [
        grid.values[np.ix_(np.searchsorted(grid.layers, layers), np.searchsorted(grid.sequences, sequences))]
        for grid in grids
    ]
    return layers, np.stack(picked)


def _slopes(
    metric: str,
    site: str,
    stack: str | None,
    layers: Sequence[int],
    values: NDArray[np.float64],
    lengths: Sequence[int],
) -> list[LengthSlope]:
    x = np.log2(np.array(lengths, dtype=np.float64))
    x -= x.mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        y = np.log2(values) if metric in EXPONENTS else values
        slopes = np.tensordot(x, np.where(np.isfinite(y), y, np.nan), axes=(0, 0)) / (x @ x)
    interval = mean_differences(np.zeros_like(slopes), slopes, paired=True, level=LEVEL)
    ends = zip(interval.difference, interval.low, interval.high, strict=True)
    means = _means(values)
    return [
        LengthSlope(metric, site, stack, int(layer), tuple(means[:, place]), float(slope), float(low), float(high))
        for place, (layer, (slope, low, high)) in enumerate(zip(layers, ends, strict=True))
    ]


def _means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    known = np.isfinite(values)
    count = known.sum(axis=2)
    total = np.where(known, values, 0.0).sum(axis=2)
    means: NDArray[np.float64] = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return means


def length_finding(
    slopes: Sequence[LengthSlope], lengths: Sequence[int], codes: Mapping[int, str | None]
) -> AxisFinding:
    """The finding along the length.

    Collapsed if the tokens collapse at the longest length and not at the shortest; collapsing if the relative residual
    of a block falls at least threefold from the shortest to the longest length and the interval of its slope is below
    zero.

    Args:
        slopes: of the run.
        lengths: ascending.
        codes: of the verdict on the tokens, at the shortest and the longest length.
    """
    short_end, long_end = lengths[0], lengths[-1]
    spread = [one for one in slopes if (one.metric, one.site) == (SPREAD, STREAM) and np.isfinite(one.means).all()]
    falling = [one for one in spread if one.means[0] >= TREND_FALL * one.means[-1] and one.high < 0]
    code, state = State.HEALTHY, "no collapse"
    if falling:
        code, state = State.COLLAPSING, f"tokens become alike as inputs grow, in {len(falling)} of {len(spread)} blocks"
    if codes.get(long_end) in ALARMING and codes.get(short_end) not in ALARMING:
        code, state = State.COLLAPSED, f"{codes[long_end]} at {long_end} tokens, {codes.get(short_end)} at {short_end}"
    if not spread:
        known = State.UNKNOWN if code is State.HEALTHY else code
        return AxisFinding("length", known.code, say("length unknown"))
    steepest = max(falling or spread, key=_change)
    first, last = steepest.means[0], steepest.means[-1]
    words = say("length", state=state, long=short(last), most=long_end, short=short(first), fewest=short_end,
                block=steepest.layer)  # fmt: skip
    place = {name: getattr(steepest, name) for name in ("metric", "site", "stack", "layer")}
    ends = ((short_end, first), (long_end, last))
    evidence = tuple({"code": code.code, **place, "value": value, "length": length} for length, value in ends)
    return AxisFinding("length", code.code, words, evidence)


def _change(slope: LengthSlope) -> float:
    """How many-fold the value rises or falls from the shortest to the longest length, as a logarithm."""
    first, last = slope.means[0], slope.means[-1]
    return math.inf if min(first, last) <= 0 < max(first, last) else abs(math.log(last / first)) if first > 0 else 0.0


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
