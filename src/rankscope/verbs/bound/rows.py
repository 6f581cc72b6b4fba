"""Evaluations of theorems as rows of a result."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from rankscope._types import Status
from rankscope.runs.rows import STATUS_CODE, RowWriter
from rankscope.theory.theorems import Evaluation, Hypothesis, LayerBound
from rankscope.verbs.bound.found import Measured

COORDINATES = ("theorem", "scope", "hypothesis")
SITE = "attention.out"
_TEN = math.log(10)


def write_evaluation(writer: RowWriter, evaluation: Evaluation, stack: str | None, sequence: int) -> None:
    """All bounds and hypotheses of one theorem on one sequence."""
    rows = _Rows(writer, evaluation.theorem, stack, sequence)
    last = max((bound.layer or 0 for bound in evaluation.layers), default=0)
    for bound in evaluation.layers:
        rows.bound(bound, "layer", bound.layer or 0)
    if evaluation.depth is not None:
        rows.bound(evaluation.depth, "depth", last)
    for hypothesis in evaluation.hypotheses:
        rows.hypothesis(hypothesis, "network", last)


def write_gains(writer: RowWriter, part: Measured) -> None:
    """What is known of the gains of each layer besides the interval itself."""
    rows = _Rows(writer, "contraction_interval", part.stack, part.sequence)
    for layer in part.layers:
        gains = None if layer.passage is None else layer.passage.gains
        if gains is None:
            continue
        rows.add("log10_any_lower_bound", "layer", layer.layer, _tens(_log(gains.any_residual.lower)))
        rows.add("log10_any_bound", "layer", layer.layer, _tens(_log(gains.any_residual.upper)))
        rows.add("log10_given_bound", "layer", layer.layer, _tens(_log(gains.given_values.upper)))
        rows.add("log10_rms_gain", "layer", layer.layer, _tens(_log(gains.rms)))
        rows.add("readable_features", "layer", layer.layer, float(gains.readable))
        if gains.ends is not None:
            rows.add("log10_likely_bound", "layer", layer.layer, _tens(_log(gains.ends.likely_upper)))
            rows.add("log10_largest_found", "layer", layer.layer, _tens(_log(gains.ends.largest)))
            rows.add("log10_smallest_found", "layer", layer.layer, _tens(_log(gains.ends.smallest)))
            rows.add("lanczos_error", "layer", layer.layer, gains.ends.error)


class _Rows:
    """Writes the rows of one theorem on one sequence."""

    def __init__(self, writer: RowWriter, theorem: str, stack: str | None, sequence: int) -> None:
        self._writer, self._theorem, self._stack, self._sequence = writer, theorem, stack, sequence

    def bound(self, bound: LayerBound, scope: str, layer: int) -> None:
        for metric, value in _numbers(bound):
            floor = bound.at_floor and metric in ("log10_measured", "log10_slack")
            self.add(metric, scope, layer, value, floor=floor)
        for hypothesis in bound.hypotheses:
            self.hypothesis(hypothesis, scope, layer)

    def hypothesis(self, hypothesis: Hypothesis, scope: str, layer: int) -> None:
        self.add("hypothesis_value", scope, layer, float(hypothesis.value), hypothesis=hypothesis.name)
        self.add("margin", scope, layer, float(hypothesis.margin), hypothesis=hypothesis.name)

    def add(
        self, metric: str, scope: str, layer: int, value: float, *, hypothesis: str | None = None, floor: bool = False
    ) -> None:
        status = Status.UNDEFINED if math.isnan(value) else Status.FLOOR if floor else Status.OK
        self._writer.add(
            metric=metric,
            site=SITE,
            stack=self._stack,
            layer=layer,
            first_sequence=self._sequence,
            values=np.array([value]),
            statuses=np.array([STATUS_CODE[status]]),
            head_axis=False,
            at={"theorem": self._theorem, "scope": scope, "hypothesis": hypothesis},
        )


def _numbers(bound: LayerBound) -> Iterator[tuple[str, float]]:
    named = {
        "log10_bound": bound.log_upper,
        "log10_lower_bound": bound.log_lower,
        "log10_measured": bound.log_measured,
        "log10_slack": bound.log_slack,
        "log10_width": bound.log_width,
        "log10_factor": bound.log_factor,
        "log10_rounding": bound.log_rounding or None,
    }
    for metric, value in named.items():
        if value is not None:
            yield metric, _tens(value)


def _tens(log_value: float) -> float:
    return log_value / _TEN


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
