"""The rows of a map as one entry per trained network, and how well each number known before training tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope.papers.trainability.grid import RESIDUAL
from rankscope.papers.trainability.judging import Interval, area_under_curve, rank_correlation, with_interval

if TYPE_CHECKING:
    from rankscope.runs.run import Run

Floats = NDArray[np.float64]
QUARTER = 0.25
"""How far from an answer without looking to a perfect one a network must come to have learnt."""
Design = tuple[int, int, int, str, str]


@dataclass(frozen=True, eq=False)
class Networks:
    """One entry per trained network.

    Attributes:
        design: depth, width, heads, gain and standard deviation of each.
        seed: of each.
        predicted: log10 of the relative residual after the last block, mean over draws, without any weights.
        measured: the same of this network before training, in exact arithmetic, mean over sequences.
        accuracy: on sequences it has not seen, after the fixed budget.
        loss: on batches of what it learns from, at the end.
        learnt_at: accuracy from which on a network has learnt.
    """

    design: tuple[Design, ...]
    seed: NDArray[np.int64]
    predicted: Floats
    measured: Floats
    accuracy: Floats
    loss: Floats
    learnt_at: float

    @property
    def group(self) -> NDArray[np.int64]:
        """Number of the design of each network."""
        known = {design: number for number, design in enumerate(dict.fromkeys(self.design))}
        return np.array([known[design] for design in self.design], dtype=np.int64)

    @property
    def depth(self) -> Floats:
        """Blocks of each."""
        return np.array([float(design[0]) for design in self.design])

    @property
    def gain(self) -> Floats:
        """Skip gain of each."""
        return np.array([float(design[3]) for design in self.design])

    @property
    def learnt(self) -> NDArray[np.bool_]:
        """Which have learnt."""
        return self.accuracy >= self.learnt_at

    def where(self, chosen: NDArray[np.bool_]) -> Networks:
        """Some of them."""
        rows = np.flatnonzero(chosen)
        return Networks(
            tuple(self.design[row] for row in rows),
            self.seed[rows],
            self.predicted[rows],
            self.measured[rows],
            self.accuracy[rows],
            self.loss[rows],
            self.learnt_at,
        )


def networks_of(run: Run) -> Networks:
    """Every network of a map."""
    means = _means(run.table)
    trained = [key for key in means if key[0] == "accuracy"]
    designs = tuple(key[2] for key in trained)
    seeds = [key[3] for key in trained]
    pairs = list(zip(designs, seeds, strict=True))
    blind = float(run.extra["blind"]["position"])
    return Networks(
        designs,
        np.array(seeds, dtype=np.int64),
        np.array([means[RESIDUAL, "predicted", design, -1] for design in designs]),
        np.array([means[RESIDUAL, "measured", design, seed] for design, seed in pairs]),
        np.array([means["accuracy", "trained", design, seed] for design, seed in pairs]),
        np.array([means["loss", "trained", design, seed] for design, seed in pairs]),
        blind + QUARTER * (1.0 - blind),
    )


def _means(table: pa.Table) -> dict[tuple[str, str, Design, int], float]:
    groups: dict[tuple[str, str, Design, int], list[float]] = {}
    kept = table.filter(pc.is_finite(table["value"]))
    names = ("metric", "source", "depth", "width", "heads", "gain", "std", "seed", "value")
    for metric, source, depth, width, heads, gain, std, seed, value in zip(
        *(kept[name].to_pylist() for name in names), strict=True
    ):
        groups.setdefault((metric, source, (depth, width, heads, gain, std), seed), []).append(value)
    return {key: float(np.mean(values)) for key, values in groups.items()}


@dataclass(frozen=True)
class Skill:
    """How well a number known before training tells how a network ends.

    Attributes:
        name: of the number.
        area: area under the curve for having learnt.
        correlation: rank correlation with the accuracy.
    """

    name: str
    area: Interval
    correlation: Interval


def skills(networks: Networks) -> list[Skill]:
    """The prediction, the measurement before training, and two rules anyone has without either."""
    scores = {
        "predict": networks.predicted,
        "measured before training": networks.measured,
        "fewer blocks": -networks.depth,
        "larger gain": networks.gain,
    }

    def area(score: Floats, outcome: Floats) -> float:
        return area_under_curve(score, outcome, networks.learnt_at)

    return [
        Skill(
            name,
            with_interval(area, score, networks.accuracy, networks.group),
            with_interval(rank_correlation, score, networks.accuracy, networks.group),
        )
        for name, score in scores.items()
    ]
