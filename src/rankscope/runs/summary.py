"""The summary of a run: for each stack, a grid of depth by headline metric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rankscope.errors import UnknownNameError
from rankscope.runs.curves import curve, names_in
from rankscope.runs.rows import of_stack, only, own_columns
from rankscope.views import Cell, measured

HEADLINE = (
    "relative_residual",
    "mean_cosine",
    "stable_rank",
    "effective_rank",
    "centred_effective_rank",
    "largest_token_share",
    "largest_channel_share",
    "attention_entropy",
    "first_token_sink_rate",
)
MAIN_SITES = ("block.out", "attention.probs", "mlp.sum", "both.sum", "attention.sum", "block.in", "final")
LONGEST = 36
SAMPLED_LAYERS = 24


@dataclass(frozen=True, eq=False)
class Summary:
    """Means over sequences (and heads) of one network.

    Args:
        stack: name of the stack and of what else distinguishes the network from others of the run; None if it has one.
        labels: label of each line: ``"in"``, the number of a block, or ``"final"``.
        metrics: names of the columns.
        sites: the site of each column.
        values: shape ``(lines, metrics)``; NaN if not measured or undefined.
        floor: whether any value in the mean is at the float floor, same shape.
        estimate: whether any value in the mean is an estimate, same shape.
        measured: whether there are rows at all, same shape; False is "not measured", not "undefined".
    """

    stack: str | None
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    sites: tuple[str, ...]
    values: NDArray[np.float64]
    floor: NDArray[np.bool_]
    estimate: NDArray[np.bool_]
    measured: NDArray[np.bool_]

    @property
    def blocks(self) -> NDArray[np.bool_]:
        """Which lines are blocks rather than the ends of the stream."""
        return np.array([label.isdigit() for label in self.labels], dtype=np.bool_)

    def cell(self, line: int, column: int) -> Cell:
        """A value with its marks; empty if it was not measured."""
        if not self.measured[line, column]:
            return Cell("")
        at = line, column
        return measured(float(self.values[at]), floor=bool(self.floor[at]), estimate=bool(self.estimate[at]))


def stacks_of(table: pa.Table) -> list[str | None]:
    """The stacks in a table, in the order of the rows; ``[None]`` for a model with one stack."""
    return list(names_in(table, "stack")) or [None]


def networks_in(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """The rows of each stack and combination of the verb's additional columns, with its name in words."""
    own = own_columns(table)
    for stack in stacks_of(table):
        mine = of_stack(table, stack)
        keys = dict.fromkeys(zip(*(mine[name].to_pylist() for name in own), strict=True)) if own else {(): None}
        for key in keys:
            here = only(mine, **dict(zip(own, key, strict=True)))
            words = [str(value) for value in key if value is not None]
            yield ", ".join([*([stack] if stack else []), *words]), here


def main_site(table: pa.Table, metric: str) -> str:
    """The default site of a metric."""
    sites = names_in(only(table, metric=metric), "site")
    return min(sites, key=lambda site: MAIN_SITES.index(site) if site in MAIN_SITES else len(MAIN_SITES))


def headline(table: pa.Table, limit: int = 6) -> list[str]:
    """Metrics to show as columns: the measured headline metrics, else the first ones in the table."""
    known = names_in(table, "metric")
    chosen = [name for name in HEADLINE if name in known]
    return (chosen + [name for name in known if name not in chosen])[:limit] if len(chosen) < 2 else chosen[:limit]


def summarise(
    table: pa.Table, *, metrics: Sequence[str] | None = None, site: str | None = None, limit: int = 6
) -> list[Summary]:
    """One grid per network: stack and, in a run of several, variant.

    Args:
        table: rows of a run.
        metrics: columns; the headline ones by default.
        site: site of every column; by default the main site of each metric.
        limit: maximum number of default columns.
    """
    known = names_in(table, "metric")
    for name in metrics or ():
        if name not in known:
            raise UnknownNameError("metric in this run", name, known)
    if site is not None and site not in (sites := names_in(table, "site")):
        raise UnknownNameError("site in this run", site, sites)
    chosen = list(metrics) if metrics is not None else headline(table, limit)
    places = [site or main_site(table, name) for name in chosen]
    several = len(list(networks_in(table))) > 1
    (alone,) = stacks_of(table)[:1]
    return [_grid(rows, name if several else alone, chosen, places) for name, rows in networks_in(table)]


def _grid(table: pa.Table, name: str | None, metrics: Sequence[str], places: Sequence[str]) -> Summary:
    """The lines are the entry of block 0, the blocks, and the final norm; columns of other sites have blocks only."""
    points: dict[tuple[str, int], tuple[float, bool, bool]] = {}
    for column, (metric, place) in enumerate(zip(metrics, places, strict=True)):
        rows = only(table, metric=metric)
        for site in (place, "block.in", "final") if place == "block.out" else (place,):
            here = only(rows, site=site)
            if not here.num_rows:
                continue
            line = curve(here, metric, site)
            for at, layer in enumerate(line.layers.tolist()):
                label = str(layer) if site == place else {"block.in": "in", "final": "final"}[site]
                if label != "in" or layer == 0:
                    points[label, column] = float(line.mean[at]), bool(line.any_floor[at]), bool(line.any_estimate[at])
    ends = {"in": -1, "final": 1 << 40}
    lines = sorted({label for label, _ in points}, key=lambda label: ends[label] if label in ends else int(label))
    shape = (len(lines), len(metrics))
    values = np.full(shape, np.nan)
    floor, estimate, measured = (np.zeros(shape, np.bool_) for _ in range(3))
    for (label, column), found in points.items():
        cell = lines.index(label), column
        values[cell], floor[cell], estimate[cell] = found
        measured[cell] = True
    return Summary(name, tuple(lines), tuple(metrics), tuple(places), values, floor, estimate, measured)


def shown_lines(count: int) -> list[int]:
    """Which of ``count`` lines to print: all up to 36, else 24 evenly spaced, with the first and the last.

    Example:
        >>> shown_lines(3), shown_lines(100)[:4], len(shown_lines(100))
        ([0, 1, 2], [0, 4, 9, 13], 24)
    """
    lines = count if count <= LONGEST else SAMPLED_LAYERS
    return [int(line) for line in np.linspace(0, max(count - 1, 0), lines).round()]
