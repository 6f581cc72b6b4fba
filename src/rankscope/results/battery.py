"""The metrics a verdict is drawn from, by the part each plays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope.results.curves import Cells, cells, names_in

PARTS: Mapping[str, tuple[str, ...]] = {
    "spread": ("relative_residual", "relative_composite_residual"),
    "cosine": ("mean_cosine",),
    "dimension": ("effective_rank", "stable_rank", "participation_ratio"),
    "centred_dimension": ("centred_effective_rank", "centred_stable_rank", "centred_participation_ratio"),
    "token_share": ("largest_token_share",),
    "channel_share": ("largest_channel_share",),
}
"""Part to the metrics that can play it; the first one measured does. A part that nothing plays stays unknown."""

STREAM_SITES = ("block.out", "mlp.sum", "both.sum", "attention.sum", "mixer.sum", "block.in", "final")


@dataclass(frozen=True, eq=False)
class Battery:
    """Values of every part on one grid of layers and sequences; NaN where a part is unknown.

    Args:
        site: the site all values were taken at.
        layers: numbers of the layers, ascending.
        played_by: the metric behind each part that was measured.
        values: part to a grid of shape ``(layers, sequences)``.
        floor: where the spread is at the float floor, same shape.
    """

    site: str
    layers: NDArray[np.int64]
    played_by: Mapping[str, str]
    values: Mapping[str, NDArray[np.float64]]
    floor: NDArray[np.bool_]

    def mean(self, part: str, row: int) -> float:
        """Mean of a part over the sequences of one layer, NaN where none is known."""
        known = self.values[part][row]
        known = known[np.isfinite(known)]
        return float(known.mean()) if known.size else float("nan")


def read_battery(table: pa.Table, stack: str | None = None) -> Battery | None:
    """The battery of one stack at the most telling site it was measured at; None when no part was measured."""
    if stack is not None:
        table = table.filter(pc.fill_null(pc.equal(table["stack"], stack), False))
    for site in STREAM_SITES:
        here = table.filter(pc.equal(table["site"], site))
        known = names_in(here, "metric")
        played = {part: next((n for n in names if n in known), None) for part, names in PARTS.items()}
        grids = {part: cells(here, name, site) for part, name in played.items() if name is not None}
        if grids:
            return _aligned(site, {p: n for p, n in played.items() if n is not None}, grids)
    return None


def _aligned(site: str, played: Mapping[str, str], grids: Mapping[str, Cells]) -> Battery:
    layers = np.unique(np.concatenate([grid.layers for grid in grids.values()]))
    sequences = np.unique(np.concatenate([grid.sequences for grid in grids.values()]))
    shape = (layers.size, sequences.size)
    values = {part: np.full(shape, np.nan) for part in PARTS}
    floor = np.zeros(shape, dtype=np.bool_)
    for part, grid in grids.items():
        at = np.ix_(np.searchsorted(layers, grid.layers), np.searchsorted(sequences, grid.sequences))
        values[part][at] = grid.values
        if part == "spread" or (part == "cosine" and "spread" not in grids):
            floor[at] = grid.floor
    return Battery(site, layers, played, values, floor)
