"""The recipe's accuracies by path length, against the library's own function on the same network."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rankscope.ext.papers.dong2021_paths.run import COORDINATES, DRAWS, REPEATS, SMALL, judge_paths
from rankscope.ext.papers.measuring.parts import RowRecorder
from rankscope.ext.papers.training.fitting import TrainingPlan, as_batch, fit
from rankscope.ext.papers.training.networks import WITHOUT_MLP, encoder_for
from rankscope.ext.paths.capture import freeze_network
from rankscope.ext.paths.effectiveness import accuracy, path_effectiveness, run_along
from rankscope.ext.paths.single import follow, sample_paths
from rankscope.runs.rows import RowWriter
from rankscope.stream.viewing import undisturbed, view_of
from rankscope.surgery.operating import operating


@pytest.fixture(scope="module", params=["sort", "memory"])
def judged(request):
    task = SMALL[request.param].make(0)
    model = encoder_for(task, layers=3, heads=2, width=16)
    fit(model, task, TrainingPlan(steps=5, batch=10), operation=WITHOUT_MLP)
    with undisturbed(model):
        view = view_of(model, as_batch(task.held.take(slice(2))))
        writer = RowWriter(coordinates=COORDINATES)
        judge_paths(model, view, task.held, task.held, RowRecorder(writer))
        rows = writer.table().to_pylist()
    return task, model, view, rows


def values(rows, **where) -> list[float]:
    return [row["value"] for row in rows if all(row[name] == wanted for name, wanted in where.items())]


def test_all_frozen_paths_are_those_of_the_library(judged) -> None:
    task, model, view, rows = judged
    data = [(as_batch(task.held), task.held.labels)]
    with undisturbed(model), operating(model, WITHOUT_MLP, view=view):
        drawn = path_effectiveness(view, model.config, data, model.classifier, lengths=[1], paths=3, repeats=1)
        network = next(iter(freeze_network(view, model.config, data[0][0]).values()))
    assert values(rows, of="whole", metric="accuracy") == list(drawn[0].accuracy)
    chosen = sample_paths(network, 1, 20, seed=20).paths
    mean = follow(network, chosen).mean(dim=0)
    found = values(rows, of="frozen", metric="accuracy", layer=1, paths="20", sequence=0)
    assert found == [accuracy([(model.classifier(mean), task.held.labels)])]


def test_recomputed_paths_are_run_one_by_one(judged) -> None:
    task, model, view, rows = judged
    batch = as_batch(task.held)
    with undisturbed(model):
        with operating(model, WITHOUT_MLP, view=view):
            network = next(iter(freeze_network(view, model.config, batch).values()))
        chosen = sample_paths(network, 2, 5, seed=3005).paths
        mean = torch.stack([run_along(view, batch, path) for path in chosen]).mean(dim=0)
    found = values(rows, of="recomputed", metric="accuracy", layer=2, paths="5", sequence=3)
    assert found == [accuracy([(model.classifier(mean), task.held.labels)])]


def test_every_length_number_and_repeat_is_there(judged) -> None:
    rows = judged[-1]
    for of in ("frozen", "recomputed"):
        for length in range(4):
            for count in DRAWS:
                assert len(values(rows, of=of, layer=length, paths=str(count))) == REPEATS
    assert all(math.isfinite(row["value"]) for row in rows)
    sizes = [values(rows, metric="size_over_output", layer=length)[0] for length in range(4)]
    assert np.all(np.diff(sizes) < 0), "at initialisation a longer sum is smaller"
