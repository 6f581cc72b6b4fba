"""The metrics a verdict is based on, by the role each plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rankscope.runs.curves import Cells, cells, names_in
from rankscope.runs.rows import of_stack, only
from rankscope.verdicts.states import DOMINANT_SHARE

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

PARTS: Mapping[str, tuple[str, ...]] = {
    "spread": ("relative_residual", "relative_composite_residual"),
    "typical": ("typical_residual",),
    "cosine": ("mean_cosine",),
    "direction": ("direction_residual",),
    "cluster_share": ("largest_cluster_share",),
    "copied_share": ("copied_token_share",),
    "distinct": ("distinct_tokens",),
    "dimension": ("effective_rank", "stable_rank", "participation_ratio"),
    "centred_dimension": ("centred_effective_rank", "centred_stable_rank", "centred_participation_ratio"),
    "directions": ("centred_energy_rank_99",),
    "token_share": ("largest_token_share",),
    "channel_share": ("largest_channel_share",),
    "size": ("mu", "residual"),
}
"""Each part with the metrics that can fill it; the first one measured is used. Otherwise the part stays unknown."""

STREAM_SITES = ("block.out", "mlp.sum", "both.sum", "attention.sum", "mixer.sum", "block.in", "final")


@dataclass(frozen=True, eq=False)
class Battery:
    """Values of every part on one grid of layers and sequences; unknown values are NaN.

    Args:
        site: the site all values were taken at.
        layers: numbers of the layers, ascending.
        sequences: numbers of the sequences, ascending.
        played_by: the metric used for each part that was measured.
        values: part to a grid of shape ``(layers, sequences)``.
        floor: where the spread is at the float floor, same shape.
        undefined: where the spread was measured but is undefined, same shape.
        vanished: where the stream is exactly zero, same shape.
        tokens: length of each sequence; None if unknown.
        dim: width of the stream; None if unknown.
    """

    site: str
    layers: NDArray[np.int64]
    sequences: NDArray[np.int64]
    played_by: Mapping[str, str]
    values: Mapping[str, Floats]
    floor: Flags
    undefined: Flags
    vanished: Flags
    tokens: Floats | None = None
    dim: int | None = None

    def of_sequences(self, chosen: Flags) -> Battery:
        """The battery restricted to some sequences."""
        return replace(
            self,
            sequences=self.sequences[chosen],
            values={part: grid[:, chosen] for part, grid in self.values.items()},
            floor=self.floor[:, chosen],
            undefined=self.undefined[:, chosen],
            vanished=self.vanished[:, chosen],
            tokens=None if self.tokens is None else self.tokens[chosen],
        )

    def spread(self) -> Floats:
        """The relative residual, or the typical residual if only that was measured."""
        return np.where(np.isfinite(self.values["spread"]), self.values["spread"], self.values["typical"])

    def direction(self) -> Floats:
        """The direction residual; if it was not measured, sqrt(1 - cosine), which the mean cosine implies.

        If a channel dominates, it alone brings the mean cosine near 1, and nothing is implied.
        """
        implied = np.sqrt(np.clip(1.0 - self.values["cosine"], 0.0, None))
        implied = np.where(self.values["channel_share"] > DOMINANT_SHARE, np.nan, implied)
        return np.where(np.isfinite(self.values["direction"]), self.values["direction"], implied)


def read_battery(
    table: pa.Table,
    stack: str | None = None,
    *,
    lengths: Mapping[int, int] | None = None,
    dim: int | None = None,
    sites: Sequence[str] = STREAM_SITES,
) -> Battery | None:
    """The battery of one stack at the most informative measured site; None if no part was measured.

    Args:
        table: rows of a run.
        stack: the stack; None for all rows.
        lengths: number of tokens of each sequence; determines the share that one token has by chance.
        dim: width of the stream.
        sites: where to look, the most informative first.
    """
    table = of_stack(table, stack)
    for site in sites:
        here = only(table, site=site)
        known = names_in(here, "metric")
        played = {part: next((n for n in names if n in known), None) for part, names in PARTS.items()}
        grids = {part: cells(here, name, site) for part, name in played.items() if name is not None}
        if set(grids) - {"size"}:
            battery = _aligned(site, {p: n for p, n in played.items() if n is not None}, grids)
            tokens = None if not lengths else np.array([lengths.get(int(s), np.nan) for s in battery.sequences])
            # For two or more finite tokens, the relative residual is undefined only if all are zero.
            zero = battery.undefined & (tokens >= 2) if tokens is not None and "spread" in played else False
            return replace(battery, tokens=tokens, dim=dim, vanished=battery.vanished | zero)
    return None


def residual_battery(
    layers: Sequence[int] | NDArray[np.int64],
    residuals: Floats,
    *,
    floor: Flags | None = None,
    metric: str = "relative_residual",
    site: str = "block.out",
) -> Battery:
    """A battery of relative residuals alone, ``(layers, sequences)``, judged by the same thresholds as any other."""
    residuals = np.asarray(residuals, dtype=np.float64)
    none = np.zeros(residuals.shape, dtype=np.bool_)
    values = {part: np.full(residuals.shape, np.nan) for part in PARTS}
    values["spread"] = residuals
    return Battery(
        site=site,
        layers=np.asarray(layers, dtype=np.int64),
        sequences=np.arange(residuals.shape[1]),
        played_by={"spread": metric},
        values=values,
        floor=none if floor is None else floor,
        undefined=np.isnan(residuals),
        vanished=none,
    )


def _aligned(site: str, played: Mapping[str, str], grids: Mapping[str, Cells]) -> Battery:
    layers = np.unique(np.concatenate([grid.layers for grid in grids.values()]))
    sequences = np.unique(np.concatenate([grid.sequences for grid in grids.values()]))
    shape = (layers.size, sequences.size)
    values = {part: np.full(shape, np.nan) for part in PARTS}
    flags = {part: np.zeros(shape, dtype=np.bool_) for part in ("floor", "undefined", "no_share")}
    leading = next((part for part in ("spread", "typical", "cosine") if part in grids), None)
    for part, grid in grids.items():
        at = np.ix_(np.searchsorted(layers, grid.layers), np.searchsorted(sequences, grid.sequences))
        values[part][at] = grid.values
        if part == leading:
            flags["floor"][at], flags["undefined"][at] = grid.floor, grid.undefined
        if part == "token_share":
            flags["no_share"][at] = grid.undefined
    # X = 0 is the only stream of two or more tokens whose size is defined (zero) while its relative values are not.
    zero = values["size"] == 0.0 if "size" in grids else flags["no_share"]
    return Battery(
        site=site,
        layers=layers,
        sequences=sequences,
        played_by=played,
        values=values,
        floor=flags["floor"] & ~flags["undefined"],
        undefined=flags["undefined"],
        vanished=zero & (flags["undefined"] | (flags["no_share"] if leading is None else False)),
    )
