"""Rows of a reproduction read as lines over depth; spreads over sequences and over seeds are kept apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope._errors import InputError
from rankscope._types import Status
from rankscope.runs.curves import names_in

Array = NDArray[np.float64]
BAND = (0.1, 0.9)


@dataclass(frozen=True, eq=False)
class Line:
    """One metric over depth; depth 0 is what enters the first block, depth l what leaves block l.

    Attributes:
        depth: 0, 1, 2, ...
        mean: over sequences and seeds.
        low: 10% quantile over sequences and seeds.
        high: 90% quantile.
        over_sequences: standard deviation over sequences, averaged over seeds.
        over_seeds: standard deviation over seeds of the mean over sequences; 0 with one seed.
        at_floor: whether any value is at the float floor.
        seeds: how many initialisations.
        sequences: how many sequences each.
    """

    depth: NDArray[np.int64]
    mean: Array
    low: Array
    high: Array
    over_sequences: Array
    over_seeds: Array
    at_floor: NDArray[np.bool_]
    seeds: int
    sequences: int

    @property
    def spread(self) -> Array:
        """Standard deviation of a single sequence of a single initialisation."""
        return np.sqrt(self.over_sequences**2 + self.over_seeds**2)


def select(table: pa.Table, where: Mapping[str, str | int]) -> pa.Table:
    """Rows whose coordinates are those given."""
    for column, value in where.items():
        table = table.filter(pc.fill_null(pc.equal(table[column], value), False))
    return table


def has_line(table: pa.Table, **where: str | int) -> bool:
    """Whether there is any such row."""
    return bool(select(table, where).num_rows)


def line(table: pa.Table, metric: str, **where: str | int) -> Line:
    """The line of ``metric`` at these coordinates.

    Raises:
        InputError: the run holds no such rows.
    """
    rows = select(table, {"metric": metric, **where})
    if rows.num_rows == 0:
        wanted = ", ".join(f"{name}={value}" for name, value in where.items())
        raise InputError(f"This run holds no {metric} for {wanted}; it holds {', '.join(names_in(table, 'metric'))}.")
    depth = rows["layer"].to_numpy() + pc.equal(rows["site"], "block.out").to_numpy().astype(np.int64)
    seed = rows["seed"].to_numpy()
    value = rows["value"].to_numpy()
    floor = pc.equal(rows["status"], str(Status.FLOOR)).to_numpy()
    depths, seeds = np.unique(depth), np.unique(seed)
    grid = [[value[(depth == d) & (seed == s)] for s in seeds] for d in depths]
    return Line(
        depth=depths.astype(np.int64),
        mean=np.array([np.concatenate(row).mean() for row in grid]),
        low=np.array([np.quantile(np.concatenate(row), BAND[0]) for row in grid]),
        high=np.array([np.quantile(np.concatenate(row), BAND[1]) for row in grid]),
        over_sequences=np.array([np.mean([_deviation(values) for values in row]) for row in grid]),
        over_seeds=np.array([_deviation(np.array([values.mean() for values in row])) for row in grid]),
        at_floor=np.array([bool(floor[depth == d].any()) for d in depths]),
        seeds=int(seeds.size),
        sequences=int(grid[0][0].size),
    )


def _deviation(values: Array) -> float:
    return float(values.std(ddof=1)) if values.size > 1 else 0.0
