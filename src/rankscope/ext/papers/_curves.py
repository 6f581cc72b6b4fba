"""Curves over depth with their spreads, published curves, and means with intervals."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope._types import Status
from rankscope.errors import InputError
from rankscope.runs.curves import names_in
from rankscope.runs.rows import only

Array = NDArray[np.float64]
BAND = (0.1, 0.9)
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantiles of Student's law with 1, 2, ... degrees of freedom."""


@dataclass(frozen=True, eq=False)
class DepthLine:
    """One metric over depth; depth 0 is the input of the first block, depth l the output of block l.

    Attributes:
        depth: 0, 1, 2, ...
        mean: over sequences and seeds.
        low: 10% quantile over sequences and seeds.
        high: 90% quantile.
        over_sequences: standard deviation over sequences, averaged over seeds.
        over_seeds: standard deviation over seeds of the mean over sequences; 0 with one seed.
        at_floor: whether any value is at the float floor.
        seeds: number of initialisations.
        sequences: number of sequences per initialisation.
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

    @property
    def end(self) -> float:
        """The mean after the last block."""
        return float(self.mean[-1])


def has_line(table: pa.Table, **where: str | int) -> bool:
    """Whether the run has such rows."""
    return bool(only(table, **where).num_rows)


def line(table: pa.Table, metric: str, **where: str | int) -> DepthLine:
    """The line of ``metric`` at these coordinates.

    Raises:
        InputError: the run holds no such rows.
    """
    rows = only(table, metric=metric, **where)
    if rows.num_rows == 0:
        wanted = ", ".join(f"{name}={value}" for name, value in where.items())
        raise InputError(f"This run holds no {metric} for {wanted}; it holds {', '.join(names_in(table, 'metric'))}.")
    depth = rows["layer"].to_numpy() + pc.equal(rows["site"], "block.out").to_numpy().astype(np.int64)
    seed, value = rows["seed"].to_numpy(), rows["value"].to_numpy()
    floor = pc.equal(rows["status"], str(Status.FLOOR)).to_numpy()
    depths, seeds = np.unique(depth), np.unique(seed)
    grid = [[value[(depth == d) & (seed == s)] for s in seeds] for d in depths]
    return DepthLine(
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


@dataclass(frozen=True, eq=False)
class PublishedLine:
    """One curve as published.

    Attributes:
        values: by depth; NaN where the paper shows zero.
        floor_from: depth from which the paper shows the rounding of its own arithmetic; None if it never does.
    """

    values: Array
    floor_from: int | None

    def is_rounding(self, depth: int) -> bool:
        """Whether the published value at ``depth`` is rounding, or too small to be read off."""
        return (self.floor_from is not None and depth >= self.floor_from) or bool(np.isnan(self.values[depth]))


def published(folder: str) -> dict[str, Any]:
    """The file ``published.json`` of a reproduction."""
    text = files("rankscope.ext.papers").joinpath(folder, "published.json").read_text(encoding="utf-8")
    facts: dict[str, Any] = json.loads(text)
    return facts


def published_line(facts: dict[str, Any], **where: str) -> PublishedLine:
    """The published curve with these labels.

    Raises:
        InputError: there is none.
    """
    for entry in facts["curves"]:
        if all(entry[name] == value for name, value in where.items()):
            values = np.array([np.nan if value is None else value for value in entry["values"]], dtype=np.float64)
            return PublishedLine(values, entry.get("floor_from"))
    raise InputError(f"No curve is published for {where}.")


@dataclass(frozen=True)
class MeanInterval:
    """A mean and half the width of its 95% interval; infinite with one value."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if math.isinf(self.half) else f"{self.mean:.3f} ± {self.half:.3f}"


def mean_interval(values: Sequence[float]) -> MeanInterval:
    r"""Student's 95% interval :math:`\bar x\pm t\,s/\sqrt n` for the mean of independent, roughly normal values.

    Estimate.

    Example:
        >>> str(mean_interval([0.9, 1.0, 1.1]))
        '1.000 ± 0.248'
    """
    number = len(values)
    mean = statistics.fmean(values)
    if number < 2:
        return MeanInterval(mean, math.inf)
    quantile = _T_975[number - 2] if number - 2 < len(_T_975) else 1.96 + 2.5 / (number - 1)
    return MeanInterval(mean, quantile * statistics.stdev(values) / math.sqrt(number))
