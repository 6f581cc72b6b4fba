"""The rows of a long-paths run, read by arm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.papers._lines import select
from rankscope.papers.dong2021.long_paths import ACCURACY, BIASES, FALLING, FIXED, LOSS, NORM, RESIDUAL, SHARE
from rankscope.papers.training.intervals import MeanInterval, mean_interval
from rankscope.runs.run import Run

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Arm:
    """Networks trained alike.

    Attributes:
        schedule: how the gain came to its end.
        gain: the end.
        shares: (seeds, lengths), projection shares of paths from the embedding.
        norms: (seeds, lengths), norm over that of the output.
        residuals: (seeds, lengths), relative residual of the sum; NaN where there is no path.
        biases: (seeds,), share of what biases bring in.
        loss: (seeds,), at the end of training.
        accuracy: (seeds,), on unseen sequences.
    """

    schedule: str
    gain: float
    shares: Array
    norms: Array
    residuals: Array
    biases: Array
    loss: Array
    accuracy: Array

    @property
    def lengths(self) -> Array:
        r"""(seeds,), mean length :math:`\sum_k k|s_k| / \sum_k |s_k|` of the shares."""
        sizes = np.abs(self.shares)
        found: Array = (sizes * np.arange(sizes.shape[1])).sum(axis=1) / sizes.sum(axis=1)
        return found

    @property
    def mean_length(self) -> MeanInterval:
        """Over seeds."""
        return mean_interval(self.lengths.tolist())

    @property
    def mean_loss(self) -> MeanInterval:
        """Over seeds."""
        return mean_interval(self.loss.tolist())

    @property
    def mean_accuracy(self) -> MeanInterval:
        """Over seeds."""
        return mean_interval(self.accuracy.tolist())


def arm(run: Run, schedule: str, gain: float) -> Arm | None:
    """One arm, or None if it was not run."""
    rows = select(run.table, {"schedule": schedule, "gain": f"{gain:g}"})
    if rows.num_rows == 0:
        return None
    metric, seed = rows["metric"].to_numpy(zero_copy_only=False), rows["seed"].to_numpy()
    layer, value = rows["layer"].to_numpy(), rows["value"].to_numpy()
    seeds, lengths = np.unique(seed), int(run.extra["layers"]) + 1

    def table(name: str, columns: int, missing: float) -> Array:
        found = np.full((seeds.size, columns), missing)
        chosen = metric == name
        found[np.searchsorted(seeds, seed[chosen]), layer[chosen]] = value[chosen]
        return found

    return Arm(
        schedule,
        gain,
        shares=table(SHARE, lengths, 0.0),
        norms=table(NORM, lengths, 0.0),
        residuals=table(RESIDUAL, lengths, np.nan),
        biases=table(BIASES, 1, 0.0)[:, 0],
        loss=table(LOSS, 1, np.nan)[:, 0],
        accuracy=table(ACCURACY, 1, np.nan)[:, 0],
    )


def arms(run: Run) -> list[Arm]:
    """All arms, the plain network first."""
    found = [arm(run, schedule, float(gain)) for gain in run.extra["gains"] for schedule in (FIXED, FALLING)]
    return [each for each in found if each is not None]
