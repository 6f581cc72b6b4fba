"""Theorems over depth, read from the rows of a ``bound`` run, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rankscope.runs.curves import names_in
from rankscope.runs.rows import of_stack, only
from rankscope.runs.summary import stacks_of
from rankscope.verdicts import Verdict

OURS = "contraction_interval"
PUBLISHED = "dong_2021_multi_head"
NUMBERS = (
    "log10_bound",
    "log10_lower_bound",
    "log10_measured",
    "log10_slack",
    "log10_width",
    "log10_factor",
    "log10_rounding",
)
VIOLATED = "violated"
HOLDS = "holds"


@dataclass(frozen=True)
class TheoremGrid:
    """One theorem on one stack: layers down, sequences across; NaN where there is no number.

    Attributes:
        layers: their numbers.
        values: per metric, (layers, sequences).
        floor: where the measured value is rounding.
        least_margin: per layer the margin of the hypothesis that fails most, relative to nothing; NaN without any.
        worst: per layer the hypothesis it belongs to.
    """

    layers: NDArray[np.int64]
    values: Mapping[str, NDArray[np.float64]]
    floor: NDArray[np.bool_]
    least_margin: NDArray[np.float64]
    worst: tuple[str, ...]

    def mean(self, metric: str) -> NDArray[np.float64]:
        """Mean over sequences, infinities kept; NaN where nothing was measured."""
        values = self.values[metric]
        known = ~np.isnan(values)
        count = known.sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(count > 0, np.where(known, values, 0.0).sum(1) / count, np.nan)


def theorems_in(table: pa.Table) -> list[str]:
    """The theorems of a run, in the order of their first row."""
    return list(dict.fromkeys(name for name in names_in(table, "theorem") if name is not None))


def rows_of(table: pa.Table, theorem: str, scope: str, stack: str | None = None) -> pa.Table:
    """Rows of one theorem and scope."""
    return of_stack(only(table, theorem=theorem, scope=scope), stack)


def grid_of(table: pa.Table, theorem: str, scope: str = "layer", stack: str | None = None) -> TheoremGrid:
    """All numbers of one theorem; empty where it has no rows of this scope."""
    rows = rows_of(table, theorem, scope, stack)
    columns = {
        name: rows[name].to_pylist() for name in ("metric", "layer", "sequence", "value", "status", "hypothesis")
    }
    layers = sorted(set(columns["layer"]))
    sequences = sorted(set(columns["sequence"]))
    place = {layer: number for number, layer in enumerate(layers)}
    across = {sequence: number for number, sequence in enumerate(sequences)}
    metrics = dict.fromkeys([*NUMBERS, *(m for m in columns["metric"] if m not in ("margin", "hypothesis_value"))])
    values = {metric: np.full((len(layers), len(sequences)), np.nan) for metric in metrics}
    floor = np.zeros((len(layers), len(sequences)), dtype=np.bool_)
    margins: list[dict[str, float]] = [{} for _ in layers]
    for metric, layer, sequence, value, status, hypothesis in zip(*columns.values(), strict=True):
        if metric == "margin":
            kept = margins[place[layer]]
            kept[hypothesis] = min(kept.get(hypothesis, np.inf), -np.inf if np.isnan(value) else value)
        elif metric in values:
            values[metric][place[layer], across[sequence]] = value
            floor[place[layer], across[sequence]] |= metric == "log10_measured" and status == "at the float floor"
    worst = [min(by_name, key=lambda name: by_name[name], default="") for by_name in margins]
    least = [by_name[name] if name else np.nan for by_name, name in zip(margins, worst, strict=True)]
    return TheoremGrid(np.array(layers, dtype=np.int64), values, floor, np.array(least), tuple(worst))


def spread(values: NDArray[np.float64]) -> str:
    """Least and largest finite value, as powers of ten."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "no finite amount"
    low, high = float(finite.min()), float(finite.max())
    return f"10^{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"10^{low:.1f} to 10^{high:.1f}"


@dataclass(frozen=True)
class Violation:
    """A bound that the measured value breaks with every hypothesis met, in powers of ten.

    Attributes:
        theorem: its name.
        stack: None in a model of one.
        sequence: its number.
        layer: number of the block; None for the whole depth.
        log10_measured: the quantity.
        log10_lower: lower bound, None where there is none.
        log10_upper: upper bound, None where there is none.
    """

    theorem: str
    stack: str | None
    sequence: int
    layer: int | None
    log10_measured: float
    log10_lower: float | None
    log10_upper: float | None

    @property
    def words(self) -> str:
        """In one clause."""
        where = "over the whole depth" if self.layer is None else f"in block {self.layer}"
        stack = f" of the {self.stack}" if self.stack else ""
        above = self.log10_upper is not None and self.log10_measured > self.log10_upper
        end, name = (self.log10_upper, "upper") if above else (self.log10_lower, "lower")
        return (
            f"{self.theorem} {where}{stack}, sequence {self.sequence} (measured 10^{self.log10_measured:.4g}, {name} "
            f"bound 10^{end:.4g})"
        )


def alarm(violations: Sequence[Violation]) -> str:
    """The first sentence of a run in which a bound is broken."""
    more = f" and {len(violations) - 1} more" if len(violations) > 1 else ""
    return (
        f"Violated: a bound is broken with every hypothesis met, {violations[0].words}{more}. Either the statement or "
        "the way this model was read is wrong: do not trust these bounds, and please report this run."
    )


def judge_bounds(
    table: pa.Table, applies: Mapping[str, bool], violations: Sequence[Violation] = (), model: str | None = None
) -> Verdict:
    """Which theorems apply, how far the published bound is from the measured value, and how far ours.

    A violation comes first.
    """
    holding = [name for name, holds in applies.items() if holds]
    apply = f"All hypotheses are met for {len(holding)} of {len(applies)} theorems"
    apply += f" ({', '.join(holding)})." if holding else "."
    said = [alarm(violations) if violations else "No bound is violated.", apply]
    evidence: list[Mapping[str, Any]] = [asdict(violation) for violation in violations]
    for name in (PUBLISHED, OURS):
        grids = [grid_of(table, name, stack=stack) for stack in stacks_of(table)] if name in applies else []
        slack = _pooled(grids, "log10_slack")
        if not np.isfinite(slack).any():
            continue
        said.append(_ours(grids, slack) if name == OURS else _published(grids, slack))
        evidence.append({"theorem": name, "metric": "log10_slack", "least": _least(slack), "cases": int(slack.size)})
    steps = (f"rankscope doctor {model or 'MODEL'}",) if violations else ()
    return Verdict(" ".join(said), tuple(evidence), VIOLATED if violations else HOLDS, steps)


def _ours(grids: list[TheoremGrid], slack: NDArray[np.float64]) -> str:
    rounding = np.nan_to_num(_pooled(grids, "log10_rounding"), nan=0.0)
    above = _pooled(grids, "log10_measured") + rounding >= _pooled(grids, "log10_lower_bound")
    inside = (slack >= -rounding) & above
    width = _pooled(grids, "log10_width")
    open_ended = f" (its lower end is zero in {int(np.isinf(width).sum())})" if np.isinf(width).any() else ""
    return (
        f"The interval of {OURS} contains the measured factor in {int(inside.sum())} of {inside.size} cases (layers x "
        f"sequences). Its upper end is {spread(slack)} times the measured factor and {spread(width)} times its lower "
        f"end{open_ended}."
    )


def _published(grids: list[TheoremGrid], slack: NDArray[np.float64]) -> str:
    met, layers = (sum(numbers) for numbers in zip(*((_met(grid), grid.layers.size) for grid in grids), strict=True))
    return (
        f"The published bound ({PUBLISHED}) is {spread(slack)} times the measured distance between tokens. "
        f"{met} of {layers} layers meet its hypotheses."
    )


def _met(grid: TheoremGrid) -> int:
    return int((grid.least_margin >= 0).sum())


def _pooled(grids: list[TheoremGrid], metric: str) -> NDArray[np.float64]:
    """All values of all stacks that are more than rounding."""
    parts = [grid.values[metric][~grid.floor] for grid in grids]
    return np.concatenate(parts) if parts else np.empty(0)


def _least(values: NDArray[np.float64]) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.min()) if finite.size else None
