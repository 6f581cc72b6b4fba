"""One metric over depth: the values of all sequences (and heads) of a layer reduced to a mean and a band."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope._types import Status
from rankscope.errors import UnknownNameError
from rankscope.runs.rows import STATUSES, chosen, only, refuse_mixture

BAND = (0.1, 0.9)
USABLE = (str(Status.OK), str(Status.FLOOR), str(Status.ESTIMATE))


@dataclass(frozen=True, eq=False)
class Curve:
    """A metric by layer.

    Args:
        layers: numbers of the layers that have rows, ascending.
        mean: mean over sequences and heads; NaN if no value is usable.
        low: 10% quantile over sequences and heads.
        high: 90% quantile over sequences and heads.
        n: number of usable values per layer.
        any_floor: whether a value of the layer is at the float floor.
        any_estimate: whether a value of the layer is an estimate.
    """

    layers: NDArray[np.int64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    n: NDArray[np.int64]
    any_floor: NDArray[np.bool_]
    any_estimate: NDArray[np.bool_]

    def __post_init__(self) -> None:
        for values in (self.layers, self.mean, self.low, self.high, self.n, self.any_floor, self.any_estimate):
            values.flags.writeable = False

    def __repr__(self) -> str:
        if not len(self.layers):
            return "<Curve of no layers>"
        first, last = float(self.mean[0]), float(self.mean[-1])
        return f"<Curve of {len(self.layers)} layers: {first:.4g} at {self.layers[0]}, {last:.4g} at {self.layers[-1]}>"


@dataclass(frozen=True, eq=False)
class Cells:
    """Usable values of one metric at one site as a grid; missing values are NaN. Heads are averaged.

    Args:
        layers: numbers of the layers, ascending.
        sequences: numbers of the sequences, ascending.
        values: shape ``(layers, sequences)``.
        floor: whether the value is at the float floor, same shape.
        undefined: whether it was measured but the formula has no value there, same shape.
    """

    layers: NDArray[np.int64]
    sequences: NDArray[np.int64]
    values: NDArray[np.float64]
    floor: NDArray[np.bool_]
    undefined: NDArray[np.bool_]


def names_in(table: pa.Table, column: str) -> list[str]:
    """Names that occur in a dictionary column, in the order in which they first occur; null is left out."""
    return [name for name in table[column].unique().to_pylist() if name is not None]


def where(table: pa.Table, metric: str, site: str, **at: Any) -> pa.Table:
    """Rows of one metric at one site, and of the coordinates given.

    Raises:
        UnknownNameError: the run has no such metric, site or coordinate.
        InputError: the rows have several values of a coordinate that was not given, such as two stacks.
    """
    for kind, name in (("metric", metric), ("site", site)):
        if name not in (known := names_in(table, kind)):
            raise UnknownNameError(f"{kind} in this run", name, known)
    return refuse_mixture(chosen(only(table, metric=metric, site=site), **at))


def curve(table: pa.Table, metric: str, site: str, **at: Any) -> Curve:
    """Reduce the rows of ``metric`` at ``site``, and of the coordinates given, layer by layer; see :class:`Curve`."""
    rows = where(table, metric, site, **at)
    layer = rows["layer"].to_numpy()
    is_usable, floor = usable(rows), _is(rows, Status.FLOOR)
    value = rows["value"].to_numpy()
    layers = np.unique(layer)
    center, low, high = (np.full(layers.size, np.nan) for _ in range(3))
    count = np.zeros(layers.size, dtype=np.int64)
    for position, number in enumerate(layers):
        mine = value[is_usable & (layer == number)]
        count[position] = mine.size
        if mine.size:
            center[position] = mine.mean()
            low[position], high[position] = _quantiles(mine)
    any_floor, any_estimate = (
        np.array([bool(marked[layer == number].any()) for number in layers], dtype=np.bool_)
        for marked in (floor, _is(rows, Status.ESTIMATE))
    )
    return Curve(layers.astype(np.int64), center, low, high, count, any_floor, any_estimate)


def cells(table: pa.Table, metric: str, site: str) -> Cells:
    """The usable values of ``metric`` at ``site`` as a grid of layers and sequences."""
    rows = where(table, metric, site)
    layers, row = np.unique(rows["layer"].to_numpy(), return_inverse=True)
    sequences, column = np.unique(rows["sequence"].to_numpy(), return_inverse=True)
    shape = layers.size, sequences.size
    values = mean_grid(shape, (row, column), rows["value"].to_numpy(), usable(rows))
    floor, undefined = (np.zeros(shape, dtype=np.bool_) for _ in range(2))
    np.logical_or.at(floor, (row, column), _is(rows, Status.FLOOR))
    np.logical_or.at(undefined, (row, column), _is(rows, Status.UNDEFINED))
    return Cells(layers.astype(np.int64), sequences.astype(np.int64), values, floor, undefined)


def mean_grid(
    shape: tuple[int, int],
    at: tuple[NDArray[np.integer], NDArray[np.integer]],
    values: NDArray[np.float64],
    valid: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """The mean of the valid values of each cell, NaN where there is none.

    Args:
        shape: rows and columns of the grid.
        at: row and column of each value.
        values: the values.
        valid: which of them count.
    """
    total, count = np.zeros(shape), np.zeros(shape)
    np.add.at(total, (at[0][valid], at[1][valid]), values[valid])
    np.add.at(count, (at[0][valid], at[1][valid]), 1.0)
    mean: NDArray[np.float64] = np.divide(total, count, out=np.full(shape, np.nan), where=count > 0)
    return mean


def _quantiles(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The ends of the band. Same values as ``np.quantile``, without its overhead per call."""
    if not np.isfinite(values).all():  # logarithms of exact zeros: cannot be interpolated with a finite number
        return np.quantile(values, BAND, method="inverted_cdf")
    ends: NDArray[np.float64] = np.interp(np.multiply(BAND, values.size - 1), np.arange(values.size), np.sort(values))
    return ends


def _is(rows: pa.Table, status: Status) -> NDArray[np.bool_]:
    matches: NDArray[np.bool_] = pc.equal(rows["status"], str(status)).to_numpy().astype(np.bool_)
    return matches


def usable(rows: pa.Table) -> NDArray[np.bool_]:
    """Which values have a status that counts."""
    listed = pc.is_in(pc.cast(rows["status"], pa.string()), value_set=pa.array(USABLE)).to_numpy()
    value = rows["value"].to_numpy()
    # Minus infinity with a usable status is the logarithm of an exact zero, and counts.
    counts: NDArray[np.bool_] = listed.astype(np.bool_) & (np.isfinite(value) | np.isneginf(value))
    return counts


assert set(USABLE) <= set(STATUSES)
