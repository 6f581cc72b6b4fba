"""The rows of watched trainings as curves over steps, one column per seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope.papers._lines import select
from rankscope.papers.dynamics.arms import Arm
from rankscope.verbs.exact.judge import SMALL

if TYPE_CHECKING:
    import pyarrow as pa

    from rankscope.runs.run import Run

Floats = NDArray[np.float64]
RESIDUAL = "log10_relative_residual"


@dataclass(frozen=True, eq=False)
class Course:
    """A number over training.

    Attributes:
        steps: at which it was read.
        values: shape ``(steps, seeds)``; NaN where it is not defined.
    """

    steps: NDArray[np.int64]
    values: Floats

    @property
    def first(self) -> Floats:
        """At the first reading, one per seed."""
        return np.asarray(self.values[0])

    @property
    def last(self) -> Floats:
        """At the last reading, one per seed."""
        return np.asarray(self.values[-1])


class Training:
    """What was read of one network, over its seeds.

    Args:
        run: of the experiment.
        arm: the network.
    """

    def __init__(self, run: Run, arm: Arm) -> None:
        self.arm = arm
        rows = select(run.table, {name: value for name, value in arm.at().items() if value is not None})
        self._table = rows.filter(pc.is_null(rows["cut"]))
        self._cut = rows.filter(pc.is_valid(rows["cut"]))
        self.seeds = np.unique(self._table["seed"].to_numpy())

    def course(self, metric: str, reduce: Callable[[pa.Table], float], **where: str | int) -> Course:
        """A metric at each step that has it, reduced over blocks and sequences."""
        rows = select(self._table, {"metric": metric, **where})
        steps = np.unique(rows["step"].to_numpy())
        values = [[reduce(select(rows, {"step": int(s), "seed": int(seed)})) for seed in self.seeds] for s in steps]
        return Course(steps.astype(np.int64), np.array(values, dtype=np.float64))

    def loss(self) -> Course:
        """Of the batch of the step."""
        return self.course("loss", _mean)

    def accuracy(self) -> Floats:
        """On sequences it has not seen, at the end, one per seed."""
        return self.course("accuracy", _mean).last

    def final_loss(self) -> Floats:
        """Over the last steps, one per seed."""
        return self.course("final_loss", _mean).last

    def residual(self) -> Course:
        """log10 of the relative residual after the last block, exact, mean over sequences."""
        return self.course(RESIDUAL, _mean, site="block.out", layer=self.arm.depth - 1)

    def seen(self) -> Course:
        """The same in float32, where it stops at the rounding of the format."""
        last = self.arm.depth - 1
        return self.course("relative_residual", _mean_log10, site="block.out", layer=last)

    def order(self) -> Course:
        """Median over blocks and sequences: those whose tokens nearly agree, where there are any."""
        residuals = _by_place(select(self._table, {"metric": RESIDUAL, "site": "block.out"}))
        return self.course("order", lambda rows: _median_order(rows, residuals))

    def factor(self) -> Course:
        """Geometric mean over blocks and sequences: of the cube in a network of order 3, else of a tiny residual."""
        cubic = float(np.nanmedian(self.order().values)) > 2
        return self.course("factor" if cubic else "linear_factor", _geometric)

    def ratio(self) -> Course:
        """Gradient of queries and keys over that of values, in the last block."""
        return self.course("qk_to_v_gradient", _mean, layer=self.arm.depth - 1)

    def cut_after(self, variant: str) -> Floats:
        """log10 of the residual after the last block when it is cut down only after training, one per seed."""
        where: dict[str, str | int] = {
            "metric": RESIDUAL,
            "cut": variant,
            "site": "block.out",
            "layer": self.arm.depth - 1,
        }
        rows = select(self._cut, where)
        return np.array([_mean(select(rows, {"seed": int(seed)})) for seed in self.seeds])

    def moved(self, which: str) -> Floats:
        """How far a map (``q``, ``k``, ``v``) is from where it started, at the end, mean over blocks, one per seed."""
        return self.course(f"{which}_moved", _mean).last


def arms_of(run: Run) -> list[Arm]:
    """The networks that were trained, in the order in which they were."""
    names = ("family", "variant", "depth", "mask", "longer")
    rows = select(run.table, {"metric": "accuracy"})
    found = dict.fromkeys(zip(*(rows[name].to_pylist() for name in names), strict=True))
    return [Arm(*facts) for facts in found]


def _usable(rows: pa.Table) -> Floats:
    values: Floats = rows["value"].to_numpy()
    return values[np.isfinite(values)]


def _mean(rows: pa.Table) -> float:
    values = _usable(rows)
    return float(values.mean()) if values.size else float("nan")


def _mean_log10(rows: pa.Table) -> float:
    values = _usable(rows)
    return float(np.log10(values[values > 0]).mean()) if (values > 0).any() else float("nan")


def _geometric(rows: pa.Table) -> float:
    values = _usable(rows)
    return float(np.exp(np.log(values[values > 0]).mean())) if (values > 0).any() else float("nan")


Place = tuple[Any, ...]


def _places(rows: pa.Table) -> list[Place]:
    return list(zip(*(rows[name].to_pylist() for name in ("seed", "step", "layer", "sequence")), strict=True))


def _by_place(rows: pa.Table) -> Mapping[Place, float]:
    exact = rows.filter(pc.is_finite(rows["value"]))
    return dict(zip(_places(exact), exact["value"].to_pylist(), strict=True))


def _median_order(rows: pa.Table, residuals: Mapping[Place, float]) -> float:
    known = [
        (residuals.get(place, 0.0), value)
        for place, value in zip(_places(rows), rows["value"].to_pylist(), strict=True)
    ]
    finite = [(residual, value) for residual, value in known if np.isfinite(value)]
    near = [value for residual, value in finite if residual < SMALL]
    chosen = near or [value for _, value in finite]
    return float(np.median(chosen)) if chosen else float("nan")
