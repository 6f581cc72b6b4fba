"""What a reading is held against: the run's own start, and random tokens of the same shape."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median

import torch

from rankscope._types import Status
from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.precision import float_floor
from rankscope.metrics import METRICS, MetricSpec, evaluate
from rankscope.monitor.alarms import LayerState
from rankscope.runs.readings import LayerValue
from rankscope.verbs.measure.run import DRAWS, gaussian_null

START_READINGS = 3
"""How many of the first readings make up the start of the run: their median forgives one odd one."""

_LARGEST_NULL = 256
Place = tuple[str | None, int]


def random_null(specs: Sequence[MetricSpec], shapes: Collection[tuple[int, int]], seed: int = 0) -> dict[str, float]:
    """Mean of each metric over Gaussian tokens, or over attention of Gaussian scores. **Estimate**, eight draws.

    Metrics that depend on the scale of the model are left out. Scores have unit variance and no mask.
    """
    null = {name: float(entry["mean"]) for name, entry in gaussian_null(specs, shapes, seed=seed).items()}
    of_attention = [spec for spec in specs if spec.side == "attention"]
    if of_attention and shapes:
        tokens = min(max(shapes)[0], _LARGEST_NULL)
        generator = torch.Generator().manual_seed(seed)
        probs = torch.randn(DRAWS, tokens, tokens, generator=generator, dtype=torch.float64).softmax(-1)
        values = evaluate(of_attention, AttentionMatrix(probs), float_floor(probs.dtype)).values
        null |= {spec.name: float(row.mean()) for spec, row in zip(of_attention, values, strict=True)}
    return null


def needed_by_null(metrics: Collection[str]) -> tuple[MetricSpec, ...]:
    """The registered metrics among these names; gradients have no null."""
    return tuple(METRICS[name] for name in metrics if name in METRICS)


class References:
    """Remembers the first readings of every metric and layer; the same size for the whole run."""

    def __init__(self) -> None:
        self.null: Mapping[str, float] = {}
        self._first: dict[tuple[str, Place], list[float]] = {}

    def take(self, table: Sequence[LayerValue]) -> None:
        """Note a reading, as long as it belongs to the start."""
        for row in table:
            known = self._first.setdefault((row.metric, (row.stack, row.layer)), [])
            if len(known) < START_READINGS and math.isfinite(row.mean):
                known.append(row.mean)

    def states(self, table: Sequence[LayerValue]) -> dict[Place, LayerState]:
        """Every layer as the rules see it."""
        now: dict[Place, dict[str, float]] = {}
        undefined: dict[Place, set[str]] = {}
        for row in table:
            now.setdefault((row.stack, row.layer), {})[row.metric] = row.mean
            if row.status == Status.UNDEFINED:
                undefined.setdefault((row.stack, row.layer), set()).add(row.metric)
        starts = {key: median(values) for key, values in self._first.items() if values}
        largest: dict[tuple[str, str | None], float] = {}
        for (metric, (stack, _)), value in starts.items():
            largest[metric, stack] = max(value, largest.get((metric, stack), -math.inf))
        return {
            place: LayerState(
                now=values,
                start={metric: starts.get((metric, place), math.nan) for metric in values},
                null=self.null,
                largest_at_start={metric: largest.get((metric, place[0]), math.nan) for metric in values},
                undefined=frozenset(undefined.get(place, ())),
            )
            for place, values in sorted(now.items(), key=lambda item: (str(item[0][0]), item[0][1]))
        }
