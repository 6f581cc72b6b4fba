from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.monitor.isolation import beside_training
from rankscope.monitor.probing import Entry, likely_component, read_ledger
from rankscope.runs.gauge_history import History
from rankscope.runs.readings import Alarm, LayerValue, Reading
from rankscope.stream.viewing import view_of
from rankscope.surgery.operating import operate
from tests.monitor.trainings import bert, gpt2, probe


def ledger_of(model: Any, **operation: Any) -> tuple[Entry, ...]:
    given = {"input_ids": probe()["input_ids"]}
    batch = prepare_inputs(load(model), given)[0]
    with operate(model, **operation), beside_training(model):
        return read_ledger(view_of(model, batch), batch, "content")[None]


def test_every_add_and_norm_is_written_down_in_order() -> None:
    entries = ledger_of(bert())
    assert [(entry.layer, entry.component) for entry in entries] == [
        (layer, component) for layer in (0, 1) for component in ("attention", "mlp", "norm")
    ]
    for earlier, later in pairwise(entries):
        if earlier.layer == later.layer and later.component == "norm":
            assert later.before == earlier.after


@pytest.mark.parametrize("build", [bert, gpt2])
def test_cut_skip_is_blamed(build: Any) -> None:
    model = build()
    entries = ledger_of(model, skip=0.0, mlp="drop")
    assert entries[0].after == pytest.approx(entries[0].branch, rel=1e-6)
    assert likely_component(entries, 1) == "skip"


def test_equal_tokens_on_entry_are_the_embeddings_doing() -> None:
    model = bert()
    with torch.no_grad():
        for table in (model.bert.embeddings.word_embeddings, model.bert.embeddings.position_embeddings):
            table.weight[:] = table.weight[:1]
    assert likely_component(ledger_of(model), 1) == "embedding"


def test_branch_that_outweighs_a_working_skip_is_blamed_itself() -> None:
    entries = [
        Entry(0, "attention", 0.9, 1e-6, 0.3),
        Entry(0, "mlp", 0.3, 0.5, 0.29),
        Entry(0, "norm", 0.29, math.nan, 0.3),
    ]
    assert likely_component(entries, 0) == "attention"


def test_norm_can_be_blamed() -> None:
    entries = [Entry(0, "attention", 0.9, 0.5, 0.88), Entry(0, "norm", 0.88, math.nan, 0.05)]
    assert likely_component(entries, 0) == "norm"


def test_nothing_is_blamed_where_nothing_fell() -> None:
    assert likely_component([Entry(0, "attention", 0.5, 0.9, 0.6)], 0) == "unknown"
    assert likely_component([], 0) == "unknown"


def test_layers_behind_the_alarm_are_not_blamed() -> None:
    entries = [Entry(0, "attention", 0.9, 0.1, 0.5), Entry(1, "mlp", 0.5, 0.4, 1e-9)]
    assert likely_component(entries, 0) == "attention"


def reading(step: int) -> Reading:
    rows = tuple(LayerValue("mean_cosine", "block.out", None, layer, step + layer / 10, 0.0, 1.0) for layer in (0, 1))
    alarm = Alarm("token_collapse", "raised", step, None, 1, "", {}, "skip", ())
    return Reading(step, {}, rows, (alarm,) if step == 7 else ())


def test_history_is_thinned_evenly_and_stays_small() -> None:
    history = History(columns=8)
    for step in range(100):
        history.take(reading(step))
    (heatmap,) = history.heatmaps()
    gaps = {later - earlier for earlier, later in pairwise(heatmap.steps)}
    assert len(heatmap.steps) <= 8
    assert len(gaps) == 1
    assert heatmap.steps[0] == 0
    assert heatmap.steps[-1] >= 100 - 2 * gaps.pop()
    assert heatmap.values[1] == tuple(step + 0.1 for step in heatmap.steps)
    assert heatmap.alarms == ((7, 1, "token_collapse"),)
