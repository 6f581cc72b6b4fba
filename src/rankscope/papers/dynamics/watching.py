"""What is read while a network trains: loss, gradients, residuals; at some steps in exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rankscope._types import Status
from rankscope.metrics import METRICS
from rankscope.models.inputs import Prepared
from rankscope.models.loading import LoadedModel
from rankscope.models.view import ModelView
from rankscope.monitor.gradients import SITE, BlockProjections, find_projections, gradient_values
from rankscope.monitor.isolation import beside_training
from rankscope.papers.dynamics.arms import Arm, Size
from rankscope.papers.training.fitting import Moment
from rankscope.runs.rows import STATUS_CODE, RowWriter
from rankscope.stream.sites import SiteSelection
from rankscope.stream.tracer import trace
from rankscope.verbs.exacting import exact
from rankscope.verbs.reader import SiteReader

SITES = ("block.in@0", "block.out")
EXACT = ("log10_relative_residual", "order", "factor", "linear_factor")
Key = tuple[str | None, int]


class Watcher:
    """A callback of ``fit`` that reads the network under the surgery it is trained under, and leaves it as it was.

    Args:
        arm: the network.
        seed: of it.
        size: which steps are read.
        loaded: the model.
        view: its structure before anything was cut.
        prepared: sequences to look at.
        probe: those of them that are looked at in exact arithmetic, as ids.
        writer: where rows go.
    """

    def __init__(
        self,
        arm: Arm,
        seed: int,
        size: Size,
        loaded: LoadedModel,
        view: ModelView,
        prepared: Prepared,
        probe: Tensor,
        writer: RowWriter,
    ) -> None:
        self._at: dict[str, str | int | None] = {**arm.at(), "seed": seed}
        self._depth = arm.depth
        self._steps = size.steps_read()
        self._looks = size.steps_looked()
        self._loaded, self._view, self._prepared, self._probe = loaded, view, prepared, probe
        self._projections = find_projections(view, loaded.config)
        self._start = _weights(loaded, self._projections)
        self._writer = writer

    def __call__(self, moment: Moment) -> None:
        """Read, if this step is one to be read."""
        if moment.step not in self._steps:
            return
        at = {**self._at, "step": moment.step}
        self.add("loss", "model.out", self._depth - 1, moment.loss, at)
        for row in gradient_values(self._loaded.model, self._projections):
            self.add(row.metric, row.site, row.layer, row.mean, at)
        self._read_moved(at)
        with beside_training(self._loaded.model):
            self._read_residuals(at)
            if moment.step in self._looks:
                self.look_exactly(at)

    def add(self, metric: str, site: str, layer: int, value: float, at: Mapping[str, str | int | None]) -> None:
        """One number."""
        status = Status.OK if math.isfinite(value) else Status.UNDEFINED
        self._writer.add(
            metric=metric,
            site=site,
            stack=None,
            layer=layer,
            first_sequence=0,
            values=np.array([value]),
            statuses=np.array([STATUS_CODE[status]]),
            head_axis=False,
            at=at,
        )

    def _read_residuals(self, at: Mapping[str, str | int | None]) -> None:
        """Relative residuals in the format the model is trained in."""
        where = {**at, "arithmetic": "float32"}
        reader = SiteReader([METRICS["relative_residual"]], self._prepared.policy, self._writer, where)
        for part in self._prepared:
            reader.start(part)
            with trace(self._view, SiteSelection.parse(SITES), reader):
                part.run(self._loaded.model)

    def look_exactly(self, at: Mapping[str, str | int | None]) -> None:
        """Residual, order and factor of every block in exact arithmetic, under whatever surgery is under way."""
        run = exact(self._loaded.model, self._probe, plain=False, stability=True)
        for row in run.table.to_pylist():
            if row["arithmetic"] == "exact" and row["metric"] in EXACT:
                self._writer.add(
                    metric=row["metric"],
                    site=row["site"],
                    stack=None,
                    layer=row["layer"],
                    first_sequence=row["sequence"],
                    values=np.array([row["value"]]),
                    statuses=np.array([STATUS_CODE[Status(row["status"])]]),
                    head_axis=False,
                    at={**at, "arithmetic": "exact"},
                )

    def _read_moved(self, at: Mapping[str, str | int | None]) -> None:
        """How far the query, key and value maps are from where they started, relative to their size there."""
        now = _weights(self._loaded, self._projections)
        for (stack, layer), parts in self._start.items():
            for name, before in parts.items():
                moved = torch.linalg.vector_norm(now[stack, layer][name] - before) / torch.linalg.vector_norm(before)
                self.add(f"{name}_moved", SITE, layer, float(moved), at)


def _weights(loaded: LoadedModel, projections: Mapping[Key, BlockProjections]) -> dict[Key, dict[str, Tensor]]:
    parameters = dict(loaded.model.named_parameters(remove_duplicate=False))
    return {
        key: {
            name: part.of(parameters[part.name].detach()).double().clone()
            for name, part in (("q", parts.query), ("k", parts.key), ("v", parts.value))
        }
        for key, parts in projections.items()
    }
