"""Every network trained and watched: loss, gradients, residuals; at some steps in exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rankscope._types import Status
from rankscope.ext.papers._spec import Settings
from rankscope.ext.papers.measuring.network import SITES
from rankscope.ext.papers.measuring.parts import RowRecorder, WorkPart, finished_run, measured_parts
from rankscope.ext.papers.training.baselines import one_answer_per_sequence
from rankscope.ext.papers.training.fitting import FitMoment, TrainingPlan, fit, share_right
from rankscope.ext.papers.training.networks import decoder_for, encoder_for
from rankscope.ext.papers.training.tasks import TrainingTask, causal_sort_task, sort_task
from rankscope.ext.papers.training_fights_collapse.arms import FULL, SMALL, VARIANTS, TrainedArm, TrainingSize
from rankscope.metrics import METRICS
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import LoadedModel, load
from rankscope.monitor.gradients import SITE, BlockProjections, find_projections, gradient_values
from rankscope.monitor.isolation import beside_training
from rankscope.runs.provenance import Provenance
from rankscope.runs.run import Run
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import view_of
from rankscope.surgery.operating import operating
from rankscope.verbs.exact.run import exact
from rankscope.verbs.origin import exact_floors
from rankscope.verbs.reader import SiteReader

COORDINATES = ("family", "variant", "mask", "depth", "seed", "step", "arithmetic", "cut", "longer")
EXACT = ("log10_relative_residual", "order", "factor", "linear_factor")
DECIDING = ("width", "heads", "looks", "probed", "seen", "learnt", "held")
"""Fields of the size that decide the rows of a network."""
LAST = 10
"""Steps over which the loss is averaged at the end."""


def measure(settings: Settings) -> Run:
    """Every arm under every seed."""
    size = settings.pick(FULL, SMALL)
    plan = TrainingPlan(steps=size.steps, rate=1e-3, warmup=0.1)
    facts = {"size": {name: size.to_json()[name] for name in DECIDING}, "plan": asdict(plan)}
    parts = [
        WorkPart(
            f"{arm.name}-seed{seed}",
            {"arm": asdict(arm), "seed": seed, **facts},
            partial(train, arm, seed, size, plan),
        )
        for seed in range(size.seeds)
        for arm in size.arms()
    ]
    provenance = Provenance(
        model="BERT and GPT-2 for the sort task",
        origin="init",
        seed=0,
        weights_dtype="float32",
        arithmetic_dtype="float32, exact at some steps",
        attention="sdpa",
        sequences=size.held,
    )
    # The most a network can get right whose tokens are all equal after the last block, for both tasks.
    tasks = [sort_task(seed, train=size.learnt, held=size.held, fresh=True) for seed in range(size.seeds)]
    collapsed = float(np.mean([one_answer_per_sequence(task.held.labels) for task in tasks]))
    return finished_run(
        settings,
        measured_parts(settings, COORDINATES, parts),
        provenance,
        exact_floors("float32"),
        size=size.to_json(),
        plan=asdict(plan),
        collapsed=collapsed,
        small=settings.small,
    )


def task_for(arm: TrainedArm, size: TrainingSize, seed: int) -> TrainingTask:
    """Sorting, at once or one symbol after the other."""
    if arm.family == "causal":
        return causal_sort_task(seed, train=size.learnt, held=size.held)
    return sort_task(seed, train=size.learnt, held=size.held, fresh=True)


def network_for(arm: TrainedArm, size: TrainingSize, task: TrainingTask, seed: int) -> PreTrainedModel:
    """The whole network before training; surgery does the cutting."""
    if arm.family == "causal":
        return decoder_for(task, layers=arm.depth, heads=size.heads, width=size.width, std=size.std, seed=seed)
    shape = {"layers": arm.depth, "heads": size.heads, "width": size.width, "mlp_width": 4 * size.width}
    return encoder_for(task, **shape, std=size.std, seed=seed)


def train(arm: TrainedArm, seed: int, size: TrainingSize, plan: TrainingPlan, rows: RowRecorder) -> None:
    """Train one network under its surgery, watch it, and judge it on held-out sequences."""
    size, plan = replace(size, steps=size.steps * arm.longer), replace(plan, steps=plan.steps * arm.longer)
    task = task_for(arm, size, seed)
    model = network_for(arm, size, task, seed)
    watcher = Watcher(arm, size, load(model), task.held.inputs["input_ids"], rows.under(**arm.at(), seed=seed))
    done = fit(model, task, plan, seed=seed, operation=arm.operation, on_step=watcher)
    end = watcher.rows.under(step=size.steps)
    with operating(model, arm.operation):
        _add(end, "accuracy", share_right(model, task.held), arm.depth - 1)
    for cut in arm.cuts:
        with operating(model, VARIANTS[cut]):
            watcher.look_exactly(end.under(cut=cut))
    _add(end, "final_loss", float(np.mean(done.losses[-LAST:])), arm.depth - 1)
    _add(end, "seconds", done.seconds, arm.depth - 1)


def _add(rows: RowRecorder, metric: str, value: float, layer: int, site: str = "model.out") -> None:
    status = Status.OK if math.isfinite(value) else Status.UNDEFINED
    rows.add(metric, value, site, layer=layer, status=status)


class Watcher:
    """A callback of ``fit`` that reads the network under the surgery it is trained under, and changes nothing.

    Args:
        arm: the network.
        size: which steps are read, and on how many sequences.
        loaded: the model, before anything is cut.
        ids: held-out sequences.
        rows: takes what is read.
    """

    def __init__(
        self, arm: TrainedArm, size: TrainingSize, loaded: LoadedModel, ids: Tensor, rows: RowRecorder
    ) -> None:
        self.rows = rows
        self._last = arm.depth - 1
        self._steps, self._looks = size.steps_read(), size.steps_looked()
        self._model = loaded.model
        self._prepared = prepare_inputs(loaded, ids[: size.seen])
        self._probe = ids[: size.probed]
        self._view = view_of(loaded.model, self._prepared[0])
        self._projections = find_projections(self._view, loaded.config)
        self._start = self._weights()

    def __call__(self, moment: FitMoment) -> None:
        """Read, if this step is one to be read."""
        if moment.step not in self._steps:
            return
        rows = self.rows.under(step=moment.step)
        _add(rows, "loss", moment.loss, self._last)
        for row in gradient_values(self._model, self._projections):
            assert row.layer is not None
            _add(rows, row.metric, row.mean, row.layer, row.site)
        # How far the query, key and value maps are from where they started, relative to their size there.
        now = self._weights()
        for (stack, layer), parts in self._start.items():
            for name, before in parts.items():
                moved = torch.linalg.vector_norm(now[stack, layer][name] - before) / torch.linalg.vector_norm(before)
                _add(rows, f"{name}_moved", float(moved), layer, SITE)
        with beside_training(self._model):
            own = rows.under(arithmetic="float32")
            reader = SiteReader([METRICS["relative_residual"]], self._prepared.policy, own.writer, dict(own.at))
            for part in self._prepared:
                reader.start(part)
                with trace(self._view, SITES, reader):
                    part.run(self._model)
            if moment.step in self._looks:
                self.look_exactly(rows)

    def look_exactly(self, rows: RowRecorder) -> None:
        """Residual, order and factor of every block in exact arithmetic, under the current surgery."""
        run = exact(self._model, self._probe, plain=False, stability=True)
        rows = rows.under(arithmetic="exact")
        for row in run.table.to_pylist():
            if row["arithmetic"] == "exact" and row["metric"] in EXACT:
                place = {"layer": row["layer"], "sequence": row["sequence"], "status": Status(row["status"])}
                rows.add(row["metric"], row["value"], row["site"], **place)

    def _weights(self) -> Mapping[tuple[str | None, int], Mapping[str, Tensor]]:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))

        def maps(parts: BlockProjections) -> dict[str, Tensor]:
            named = {"q": parts.query, "k": parts.key, "v": parts.value}
            return {k: part.of(parameters[part.name].detach()).double().clone() for k, part in named.items()}

        return {key: maps(parts) for key, parts in self._projections.items()}
