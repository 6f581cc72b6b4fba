"""An ablation read as a grid: variants by depth, for each mask and each kind of weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from rankscope.runs.curves import Curve, curve, names_in
from rankscope.runs.not_finite import Lost, first_not_finite
from rankscope.runs.rows import of_stack, only
from rankscope.runs.summary import stacks_of

MEASURE = "relative_residual"


@dataclass(frozen=True)
class Arm:
    """One network of the grid: the curve of one metric, and all its rows."""

    weights: str
    mask: str
    stack: str | None
    variant: str
    line: Curve
    rows: pa.Table


def arms(table: pa.Table, metric: str = MEASURE, site: str = "block.out") -> Iterator[Arm]:
    """The curve of ``metric`` for every network, in the order in which they were run."""
    for weights in names_in(table, "weights"):
        for mask in names_in(table, "mask"):
            for variant in names_in(table, "variant"):
                rows = only(table, weights=weights, mask=mask, variant=variant)
                for stack in stacks_of(rows) if rows.num_rows else ():
                    mine = of_stack(rows, stack)
                    if metric in names_in(mine, "metric") and site in names_in(mine, "site"):
                        yield Arm(weights, mask, stack, variant, curve(mine, metric, site), mine)


@dataclass(frozen=True)
class LostNetwork:
    """A network of the grid with NaN or infinity in it."""

    weights: str
    mask: str
    variant: str
    lost: Lost

    @property
    def name(self) -> str:
        """The network in words."""
        return f"{self.variant} ({self.weights} weights, {self.mask} mask)"


def lost_networks(table: pa.Table) -> list[LostNetwork]:
    """Which networks stop being finite and where each does first, in the order in which they were run."""
    if first_not_finite(table) is None:
        return []
    found = []
    for weights in names_in(table, "weights"):
        for variant in names_in(table, "variant"):
            for mask in names_in(table, "mask"):
                lost = first_not_finite(only(table, weights=weights, mask=mask, variant=variant))
                found += [] if lost is None else [LostNetwork(weights, mask, variant, lost)]
    return found
