"""The rows of a circle run, read by network."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.papers._lines import select
from rankscope.runs.curves import names_in
from rankscope.runs.run import Run

Array = NDArray[np.float64]
RADIUS, MET, APART = 0.3, 0.01, 10.0
"""Of the circle; the share of the first distance below which two points have met, and above which they are apart."""
LEARNED = 0.01
"""Share of the loss of a block that always answers the centre, below which a block has learned the circle."""


@dataclass(frozen=True, eq=False)
class Free:
    """One network running free.

    Attributes:
        distance: between the points after 0, 1, ... steps, as float64 gives it.
        centre: how far the middle of the two is from that of the circle.
        exact: decimal logarithm of the distance in exact arithmetic.
        places: (steps, 4), both points; empty except for the first seed.
        loss: at the end of training.
        radial: how one step stretches a small change of radius.
        steps: asked for; the run is shorter where a point was lost.
    """

    distance: Array
    centre: Array
    exact: Array
    places: Array
    loss: float
    radial: float
    steps: int

    @property
    def end(self) -> str:
        """``"met"``, ``"apart"`` (flown apart), ``"drifted"`` (together or not, off the circle) or ``"kept"``."""
        first = self.distance[0]
        if self.distance[-1] < MET * first:
            return "met"
        if self.distance.max() > APART * first or len(self.distance) <= self.steps:
            return "apart"
        off = max(abs(self.distance[-1] / first - 1.0), self.centre[-1] / RADIUS)
        return "kept" if off < 0.1 else "drifted"

    @property
    def learned(self) -> bool:
        """Whether training has led to the circle; always answering the centre loses half a squared radius."""
        return self.loss < LEARNED * RADIUS**2 / 2

    @property
    def met_at(self) -> int | None:
        """First step at which the points have met; None if they never do."""
        met = np.flatnonzero(self.distance < MET * self.distance[0])
        return int(met[0]) if met.size else None

    @property
    def left(self) -> int | None:
        """First step at which the distance is off by a tenth; None if it never is."""
        off = np.flatnonzero(np.abs(self.distance / self.distance[0] - 1.0) > 0.1)
        return int(off[0]) if off.size else None


def variants(run: Run) -> list[str]:
    """In the order in which they were run."""
    return names_in(run.table, "variant")


def widths(run: Run) -> list[int]:
    """In the order in which they were run."""
    return [int(width) for width in run.extra["widths"]]


def networks(run: Run, variant: str, width: int) -> list[Free]:
    """Every seed of one variant."""
    rows = select(run.table, {"variant": variant, "width": width})
    metric, seed = rows["metric"].to_numpy(zero_copy_only=False), rows["seed"].to_numpy()
    value = rows["value"].to_numpy()

    def of(name: str, number: int) -> Array:
        found: Array = value[(metric == name) & (seed == number)]
        return found

    blocks = []
    for number in np.unique(seed):
        corners = [of(name, number) for name in ("x_first", "y_first", "x_second", "y_second")]
        blocks.append(
            Free(
                distance=of("distance", number),
                centre=of("centre", number),
                exact=of("log10_distance_exact", number),
                places=np.stack(corners, axis=-1),
                loss=float(of("final_loss", number)[0]),
                radial=float(of("radial_factor", number)[0]),
                steps=int(run.extra["steps"]),
            )
        )
    return blocks


def geometric(values: list[float]) -> float:
    """Geometric mean."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))
