"""Why a run went bad: events before it, in order, and never a cause that was neither shown nor recorded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankscope as rs
from rankscope.monitor import Alarm, Gauge, read_record
from rankscope.monitor.readings import noted
from rankscope.monitor.why import Why, explained, why
from tests.harm.healthy import Language, next_letters, of_letters
from tests.monitor.trainings import alarms_raised, batches, gpt2, probe

SLOW = [(step, 1e-3) for step in range(0, 200, 4)]
FIRST = noted("learning_rate", 0, "AdamW, learning rate 0.001", "rate", now=1e-3, before=math.nan, declared=1.0)


def alarm(name: str, step: int, component: str = "unknown", words: str = "Numbers.") -> Alarm:
    return Alarm(name, "raised", step, None, None, words, {}, component)


def of(raised: list[Alarm], *notes: Alarm, motions: Any = SLOW) -> Why:
    return explained(raised, [FIRST, *notes], motions, len(motions))


def test_without_an_alarm_no_fault_was_seen_and_that_is_not_health() -> None:
    assert str(of([])).startswith("No fault seen (50 readings).")
    found = of([], noted("weights_written", 80, "x", "weights"))
    assert str(found).startswith("No alarm (50 readings); recorded: Step 80: x.")
    assert found.since is None


@pytest.mark.parametrize(
    ("event", "component"),
    [
        (noted("weights_written", 80, "something wrote", "weights", size=0.5), "weights"),
        (noted("model_changed", 80, "x.py:3 now mul", "structure"), "structure"),
        (noted("optimizer_settings", 80, "weight_decay 100", "optimizer", now=100.0, before=0.1), "optimizer"),
        (noted("objective_changed", 80, "neg is new", "objective"), "objective"),
    ],
)
def test_an_event_that_nobody_declared_leads(event: Alarm, component: str) -> None:
    for name in ("loss_rises", "token_collapse", "not_finite"):
        found = of([alarm(name, 96)], event).cause
        assert found is not None
        assert (found.how, found.step, found.component) == ("recorded", 80, component)
    assert of([alarm("token_collapse", 300)], event).cause is None, "long before"
    assert of([alarm("token_collapse", 60)], event).cause is None, "after it went bad"
    declared = Alarm(**{**event.to_json(), "evidence": {"declared": 1.0}})
    assert of([alarm("token_collapse", 96)], declared).cause is None


def test_a_rate_is_the_cause_only_if_weights_move_fast_with_it() -> None:
    raised = noted("learning_rate", 80, "learning rate 1", "rate", now=1.0, before=1e-3)
    by_schedule = Alarm(**{**raised.to_json(), "evidence": {**raised.evidence, "declared": 1.0}})
    fast = [(step, 0.3 if step > 80 else 1e-3) for step, _ in SLOW]
    for event in (raised, by_schedule):
        found = of([alarm("loss_rises", 96)], event, motions=fast)
        assert found.cause is not None
        assert (found.cause.component, found.cause.step) == ("rate", 80)
        assert any(line.how == "seen" and "0.3 of their norm" in line.words for line in found.lines)
    assert of([alarm("loss_rises", 96)], by_schedule).cause is None, "weights move as before"
    from_the_start = of([alarm("token_collapse", 20)], motions=[(step, 0.2) for step, _ in SLOW]).cause
    assert from_the_start is not None
    assert "learning rate 0.001" in from_the_start.words, "a rate that was set is an event as well"
    fallen = noted("learning_rate", 80, "learning rate 1e-6", "rate", now=1e-6, before=1e-3, declared=1.0)
    assert of([alarm("loss_rises", 96)], fallen).cause is None


def test_facts_lead_if_nothing_is_earlier_and_a_fault_of_the_model_is_older_than_what_follows() -> None:
    data = of([alarm("repeated_sequences", 90, "data"), alarm("token_collapse", 100)]).cause
    assert data is not None
    assert data.component == "data"
    shown = of([alarm("shown_faults", 0, "structure", "No skips."), alarm("token_collapse", 8)]).cause
    assert shown is not None
    assert (shown.how, shown.words) == ("shown", "No skips.")
    alone = of([alarm("token_collapse", 100)])
    assert alone.cause is None
    assert "nothing was shown or recorded" in str(alone)


def test_a_rate_of_one_is_named_while_the_run_goes_on_and_from_its_record(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with rs.watch(model, optimizer, schedule=2, actions=(), record=tmp_path, metrics=["relative_residual"]) as watch:
        assert str(watch.why()) == "Nothing was read."
        for step in range(170):
            if step == 90:
                optimizer.param_groups[0]["lr"] = 1.0
            ids, targets = next_letters(batch=4)
            of_letters(model(ids), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    rises = [one for one in watch.alarms if one.name == "loss_rises"]
    assert len(rises) == 1, "told once"
    assert "Follows learning rate, step 90: learning rate 1 instead of 0.002 (x 500)." in rises[0].sentence
    found = why(read_record(tmp_path))
    assert found.cause is not None
    assert (found.cause.component, found.cause.step) == ("rate", 90)
    assert "learning rate 1 instead of 0.002 (x 500)" in str(found).split("\n")[0]


def test_weights_that_were_written_and_a_loss_that_stays_up_are_told_together() -> None:
    def change(model: Any, optimizer: Any, step: int) -> None:
        if step == 100:
            for one in model.transformer.parameters():
                one.data = 3.0 * torch.randn_like(one)
            optimizer.param_groups[0]["lr"] = 1e-6

    given = batches(1)[0]
    model = gpt2(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gauge = Gauge(model, {"input_ids": probe()["input_ids"]}, schedule=4, actions=(), strict=True)
    gauge.optimizers, found = (optimizer,), list[Alarm]()
    for step in range(180):
        change(model, optimizer, step)
        optimizer.zero_grad()
        loss = model(**given).loss
        loss.backward()
        gauge.after_backward(step)
        optimizer.step()
        reading = gauge.step(step, loss=loss)
        found += [] if reading is None else reading.alarms
    (alarm,) = [one for one in found if one.name == "loss_rises"]
    assert (alarm.component, alarm.evidence["loss_risen"] >= 1.0) == ("weights", True)
    assert "something other than the optimizer wrote" in alarm.sentence


def test_an_objective_that_changes_is_an_event_and_objectives_in_turn_are_none() -> None:
    def changed(at: int, turn: int = 0) -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        gauge = Gauge(Sequences(model), torch.randn(8, 5, 4), schedule=4, actions=(), alarms=("loss_rises",))
        gauge.optimizers, found = (optimizer,), list[str]()
        for step in range(80):
            x = torch.randn(8, 5, 4)
            out = gauge._prober.model(x)
            loss = nn.functional.cross_entropy(out.flatten(0, 1), torch.zeros(40, dtype=torch.long))
            loss = -loss if step >= at or (turn and step // turn % 2) else loss
            gauge.before_backward(loss)
            loss.backward()
            gauge.after_backward(step)
            optimizer.step()
            optimizer.zero_grad()
            reading = gauge.step(step, loss=loss)
            found += [] if reading is None else [one.sentence for one in reading.notes if one.component == "objective"]
        gauge.close()
        return found

    assert changed(at=99) == []
    (words,) = changed(at=50)
    assert "the loss is computed otherwise: Neg() new" in words
    assert changed(at=99, turn=2) == []


class Sequences(nn.Module):
    """Blocks that are read, for a model of two layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.blocks, self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.blocks(x))


def test_a_batch_that_is_not_finite_is_what_the_alarm_says() -> None:
    torch.manual_seed(0)
    model = Sequences(nn.Linear(4, 3)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found: list[Alarm] = []
    with Gauge(model, torch.randn(8, 6, 4), schedule=1, actions=(), alarms=("not_finite",), strict=True) as gauge:
        for step in range(6):
            x = torch.randn(8, 6, 4)
            x[0, 0, 0] = math.nan if step >= 4 else 0.0
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            gauge.after_backward(step)
            optimizer.step()
            reading = gauge.step(step, loss=loss, batch=x)
            found += [] if reading is None else reading.alarms
    assert [(alarm.step, alarm.component) for alarm in found] == [(4, "data")]


def test_resumed_run_keeps_its_history_and_other_code_is_told_at_once(tmp_path: Path) -> None:
    model = gpt2(dropout=0.0)
    given = {"input_ids": probe()["input_ids"]}
    with Gauge(model, given, schedule=1, record=tmp_path, actions=(), strict=True) as gauge:
        for step in range(4):
            gauge.step(step)
    with Gauge(model, given, schedule=1, record=tmp_path, actions=(), strict=True) as gauge:
        same = gauge.step(4)
    assert same is not None
    assert same.alarms == ()
    assert [one.name for one in same.notes if one.component != "none"] == []
    with (
        rs.operate(model, rs.Surgery(skip=0.5)),
        Gauge(model, given, schedule=1, record=tmp_path, actions=(), strict=True) as gauge,
    ):
        other = gauge.step(5)
    assert other is not None
    told = [one for one in other.notes if one.component != "none"]
    assert [(one.name, one.component) for one in told] == [("model_changed", "structure")]
    assert [reading.step for reading in read_record(tmp_path).readings] == [*range(6)]


def test_gradients_that_are_scaled_turned_or_replaced_are_events() -> None:
    def named(act: Any) -> set[str]:
        model = gpt2(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with rs.watch(model, optimizer, schedule=1, actions=()) as watch:
            for given in batches(6, sequences=8):
                model(**given).loss.backward()
                for one in model.parameters():
                    act(one.grad)
                optimizer.step()
                optimizer.zero_grad()
        notes = [one for one in watch.notes if one.name == "gradient_changed"]
        return {one.sentence.split("gradients are ")[1].split(" between")[0] for one in notes}

    assert named(lambda gradient: None) == set()
    assert named(lambda gradient: gradient.mul_(0.01)) == {"scaled"}
    assert named(lambda gradient: gradient.neg_()) == {"turned"}
    assert named(lambda gradient: gradient.sign_()) == {"at another angle"}


def test_settings_are_in_order_in_what_is_told() -> None:
    def change(model: Any, optimizer: Any, step: int) -> None:
        if step == 8:
            optimizer.param_groups[0]["betas"] = (0.9, 0.0)

    found = [one for one in alarms_raised(gpt2(dropout=0.0), change, steps=12) if one.name == "optimizer_settings"]
    assert [one.sentence for one in found] == ["Step 8: betas[1] 0 instead of 0.999 (x 0)."]
