from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankscope import Surgery
from rankscope.examination import Finding
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.monitor import Alarm, Gauge, read_record
from rankscope.monitor.alarms import ALARMS, LayerState
from rankscope.monitor.causes import (
    Cause,
    Moment,
    Scene,
    Structure,
    find_cause,
    read_structure,
)
from rankscope.monitor.isolation import beside_training
from rankscope.monitor.readings import LayerValue
from rankscope.stream.viewing import view_of
from rankscope.surgery.operating import operate
from tests.monitor.trainings import alarms_raised, bert, gpt2, probe


def structure_of(model: Any, **operation: Any) -> Structure:
    batch = prepare_inputs(load(model), {"input_ids": probe()["input_ids"]})[0]
    with operate(model, Surgery(**operation)), beside_training(model):
        return read_structure(view_of(model, batch), batch)


@pytest.mark.parametrize("build", [gpt2, bert])
def test_gains_and_masks_are_those_of_the_model(build: Any) -> None:
    found = structure_of(build())
    assert found.gains == {f"/{layer}": pytest.approx(1.0, abs=1e-5) for layer in (0, 1)}
    assert found.sees_later == dict.fromkeys(("/0", "/1"), build is bert)


@pytest.mark.slow
def test_changed_gains_and_masks_are_named_by_block() -> None:
    model = gpt2()
    before = structure_of(model)
    assert structure_of(model).differences(before) == ()
    (halved,) = structure_of(model, skip=0.5).differences(before)
    assert (halved.component, halved.words) == (
        "skip",
        "the skips carry 0.5 of the stream instead of 1 in blocks 0 to 1",
    )
    (one,) = structure_of(model, skip=0.0, layers=1).differences(before)
    assert one.words.endswith("carry 0 of the stream instead of 1 in block 1")
    (mask,) = structure_of(model, mask="complete").differences(before)
    assert (mask.component, "which it did not in blocks 0 to 1" in mask.words) == ("attention", True)
    (shapes,) = structure_of(bert(layers=3)).differences(structure_of(bert()))[:1]
    assert shapes.component == "shapes"


def test_mlps_that_return_zero_while_a_model_trains_are_named() -> None:
    model, heard = gpt2(dropout=0.0), list[Alarm]()
    given = {"input_ids": probe()["input_ids"]}
    gauge = Gauge(model, given, schedule=1, actions=(heard.append,), strict=True)
    for step in range(8):
        gauge.step(step)
    assert heard == []
    model.transformer.h[1].mlp.register_forward_hook(lambda module, args, output: 0.0 * output)
    readings = [gauge.step(step) for step in range(8, 13)]
    assert heard == [], "the loss is not known, so that it may be planned"
    changed = [note for reading in readings if reading is not None for note in reading.notes]
    assert [(alarm.component, alarm.step) for alarm in changed] == [("mlp", 8)]
    assert "the mlp branch adds at most 0 of what it did in block 1" in changed[0].sentence


SWAPPED = LayerValue("settings_contradiction", "averages", None, None, 12.0, 12.0, 12.0)
WRITE = LayerValue("weights_written", "head.weight (head)", None, None, 4.0, 0.9, 187.0)
ENTERED = Structure("x", {"/0": 1.0}, {}, {"": 0.9}, {"": 0.5}, entry_size={"": 1.0}, settings={"drop": "p=0.1"})
ROOM = Structure("x", {"/0": 1.0}, {}, {"": 0.9}, {"": 0.5})


def scene(alarm: str = "token_collapse", layer: int | None = 0, **given: Any) -> Scene:
    """A scene without any evidence, apart from what is given."""
    empty = LayerState({}, {}, {}, {})
    facts: dict[str, Any] = {
        "state": empty, "whole": empty, "past": [Moment(step, {(None, 0): 1e-3}) for step in range(0, 200, 5)],
        "changes": (), "before": None, "structure": lambda: ROOM, "not_finite": lambda: None,
        "diagnose": tuple, "faults": (), "inputs_apart": 0.5, "structural": lambda: None,
            "experiment": lambda: Cause("mlp", "by experiment"),
    }  # fmt: skip
    return Scene(ALARMS[alarm], None, layer, **{**facts, **given})


def whole(**now: float) -> LayerState:
    return LayerState(now, {}, {}, {})


def past(
    *, rate: Any = lambda step: 1e-3, loss: Any = lambda step: 2.0, motion: Any = lambda step: 1e-3
) -> list[Moment]:
    return [Moment(step, {(None, 0): motion(step)}, rate(step), loss(step)) for step in range(0, 200, 5)]


@pytest.mark.parametrize("alarm", ["token_collapse", "input_collapse"])
@pytest.mark.parametrize(
    ("given", "component"),
    [
        ({"whole": whole(batch_copies=1.0)}, "data"),
        ({"whole": whole(batch_common=0.95)}, "data"),
        ({"whole": whole(batch_ignored=1.0)}, "data"),
        ({"whole": whole(batch_cut=4.0, batch_length=6.0)}, "data"),
        ({"whole": whole(gradient_underflow=0.9, gradient_spacing=6e-8)}, "gradients"),
        ({"whole": whole(still_steps=16.0, weights_moved=1.0, weights_stopped=0.9)}, "gradients"),
        ({"past": [*past(motion=lambda step: 0.05)[:-1], Moment(200, {}, contradiction=SWAPPED)]}, "optimizer"),
        ({"not_finite": lambda: Cause("activations", "")}, "activations"),
        ({"changes": (Cause("skip", "the skips carry 0.5"),)}, "skip"),
        ({"past": past(motion=lambda step: 0.05)}, "rate"),
        ({"past": past(motion=lambda s: 0.02 if s > 150 else 1e-3, rate=lambda s: 0.1 if s > 150 else 1e-3)}, "rate"),
        ({"past": [*past(motion=lambda step: 0.05)[:-1], Moment(200, {}, 1e-3, written=(WRITE,))],
          "changes": (Cause("mlp", "the mlp branch adds at most 0.01"),)}, "weights"),
        ({"past": [*past()[:-1], Moment(200, {}, spread=LayerValue("embedding_spread", "e", None, None, *3 * [0.1]))]},
         "embedding"),
        ({"before": ENTERED, "structure": lambda: replace(ENTERED, entry_size={"": 50.0})}, "embedding"),
        ({"before": ENTERED, "structure": lambda: replace(ENTERED, inputs_entry={"": 0.01})}, "embedding"),
        ({"before": ENTERED, "structure": lambda: replace(ENTERED, settings={"drop": "p=0.9"})}, "structure"),
        ({"whole": whole(still_steps=32.0, weights_moved=0.0)}, "optimizer"),
        ({"past": past(loss=lambda step: 2.0 if step < 180 else -2.0)}, "objective"),
        ({"state": LayerState({}, {}, {}, {}, settled=True)}, "objective"),
        ({"structure": lambda: Structure("x", {}, {}, {"": 0.01}, {"": 0.5})}, "embedding"),
        ({"structure": lambda: Structure("x", {}, {}, {"": 0.9}, {"": 0.0})}, "embedding"),
        ({"structural": lambda: Cause("skip", "no skips")}, "skip"),
    ],
)  # fmt: skip
def test_every_alarm_goes_through_the_same_search(alarm: str, given: dict[str, Any], component: str) -> None:
    found = find_cause(scene(alarm, **given))
    assert found.component == component


def test_the_rate_is_to_blame_only_if_weights_follow_it() -> None:
    def late(motion: float, rate: float) -> str:
        moments = past(motion=lambda s: motion if s > 100 else 2e-3, rate=lambda s: rate if s > 100 else 1e-3)
        return find_cause(scene(past=moments)).component

    assert late(0.05, 1e-2) == "rate"
    assert late(0.016, 3e-3) == "rate", "not raised fourfold, and weights move in proportion"
    assert late(0.05, 1e-3) == "mlp", "hostile: at the same rate, something else moves them"
    assert late(0.05, math.nan) == "rate", "a rate that is not known is not cleared"


@pytest.mark.slow
def test_parameters_that_become_one_or_two_are_named() -> None:
    model = bert()
    before, word = structure_of(model), model.bert.embeddings.word_embeddings
    decoder, kept = model.cls.predictions.decoder, model.cls.predictions.decoder.weight
    assert before.shared["cls.predictions.decoder.weight"] == "bert.embeddings.word_embeddings.weight"
    assert structure_of(model).differences(before) == (), "hostile: tied from the start"
    decoder.weight = nn.Parameter(kept.detach().clone())
    (untied,) = structure_of(model).differences(before)
    assert untied.component == "weights"
    names = "cls.predictions.decoder.weight and bert.embeddings.word_embeddings.weight"
    assert untied.words == f"{names} were one parameter and are two now"
    apart = structure_of(model)
    decoder.weight.data = word.weight.data  # two objects in one memory
    (tied,) = structure_of(model).differences(apart)
    assert tied.words == f"{names} were two parameters and are one now"
    decoder.weight = word.weight
    (tied,) = structure_of(model).differences(apart)
    assert tied.words == f"{names} were two parameters and are one now", "and no other shapes"
    found = find_cause(scene("model_changed", None, before=apart, structure=lambda: structure_of(model)))
    assert found.component == "weights"
    assert "Look at what assigned cls.predictions.decoder.weight" in found.change


def test_answers_that_are_all_alike_have_the_cause_that_is_shown() -> None:
    def cause(**given: Any) -> str:
        facts = {"answers_loss": 1.4, "mean_answer_loss": 1.4, "answers_apart": 0.01, "total_gradient_norm": 1.0}
        own = whole(**{"answers_alike": 128.0, **facts, **given.pop("facts", {})})
        return find_cause(scene("constant_answer", None, **{"whole": own, "state": own, **given})).component

    shown = Finding("lost_in_module", "Lost.", "Look.", certainty="shown", measured="x", before=0.0, after=1.0)
    assert cause() == "unknown", "what is left over is not shown"
    assert cause(diagnose=lambda: (shown,)) == "structure"
    oversmoothed = replace(shown, code="deep_post_norm")
    assert cause(diagnose=lambda: (oversmoothed,)) == "unknown", "hostile: inputs that are apart are not lost there"
    assert cause(diagnose=lambda: (oversmoothed,), inputs_apart=1e-3) == "structure"
    assert cause(facts={"total_gradient_norm": 0.0}) == "gradients"
    assert cause(past=past(motion=lambda step: 1e-6)) == "rate"
    assert cause(past=past(motion=lambda step: 0.05)) == "rate"
    assert cause(facts={"answers_apart": 1e-9}) == "head"
    assert cause(facts={"answers_crossed": 1.0}, diagnose=lambda: (shown,)) == "objective"
    settled = LayerState({"answers_alike": 128.0}, {}, {}, {}, settled=True)
    assert cause(state=settled) == "unknown", "the gradient of the best constant answer vanishes"
    assert cause(facts={"answers_apart": 1e-9}, inputs_apart=1e-3) == "unknown", (
        "hostile: the head is given equal inputs"
    )
    assert cause(facts={"total_gradient_norm": math.nan}) == "unknown", "whether gradients arrive is not known"


def test_no_alarm_has_a_cause_written_into_it() -> None:
    states = [name for name, spec in ALARMS.items() if not (spec.is_event or spec.is_note)]
    assert {find_cause(scene(name)).component for name in states} <= {"mlp", "attention"}


def test_equal_tokens_on_entry_are_the_embeddings_doing() -> None:
    model = bert()
    with torch.no_grad():
        for table in (model.bert.embeddings.word_embeddings, model.bert.embeddings.position_embeddings):
            table.weight[:] = table.weight[:1]
    found = structure_of(model)
    assert find_cause(scene(structure=lambda: found)).component == "embedding"
    assert find_cause(scene(structure=lambda: structure_of(bert()))).component == "mlp"


@pytest.mark.parametrize(("entropy", "word"), [(1.0, "does not depend on queries"), (math.nan, "the mask")])
def test_no_gradient_at_all_is_the_fault_of_attention_and_a_small_one_is_not(entropy: float, word: str) -> None:
    none, little = (
        LayerState({"qk_to_v_gradient": value, "attention_entropy": entropy}, {}, {}, {}) for value in (0.0, 1e-6)
    )
    found = find_cause(scene("vanishing_qk_gradients", state=none))
    assert (found.component, word in found.words) == ("attention", True)
    assert find_cause(scene("vanishing_qk_gradients", state=little)).component == "mlp"


def test_attention_that_averages_all_tokens_is_found_by_switching_it_off() -> None:
    model = bert(layers=4, dropout=0.0)
    heard: list[Alarm] = []
    gauge = Gauge(model, probe(), schedule=1, alarms=["token_collapse"], actions=(heard.append,), strict=True)
    gauge.step(0)
    with torch.no_grad():
        for layer in model.bert.encoder.layer[2:]:
            layer.attention.self.query.weight.zero_()
            layer.attention.output.dense.weight.mul_(1e4)
    for step in (1, 2):
        gauge.step(step)
    (alarm,) = heard
    assert alarm.component == "attention"
    assert "With attention off in blocks 2 to 3, the relative residual is" in alarm.sentence


def test_resumed_run_keeps_its_history_and_a_halved_skip_is_named_at_once(tmp_path: Path) -> None:
    model = gpt2(dropout=0.0)
    given = {"input_ids": probe()["input_ids"]}
    with Gauge(model, given, schedule=1, record=tmp_path, actions=(), strict=True) as gauge:
        readings = [gauge.step(step) for step in range(4)]
    assert readings[0] is not None
    with Gauge(model, given, schedule=1, record=tmp_path, actions=(), strict=True) as gauge:
        same = gauge.step(4)
    assert same is not None
    assert same.alarms == ()
    with (
        operate(model, Surgery(skip=0.5)),
        Gauge(model, given, schedule=1, record=tmp_path, actions=(), strict=True) as gauge,
    ):
        other = gauge.step(5)
        collapsed = []
        with operate(model, Surgery(skip=0.0, mlp="drop", attention="uniform", mask="complete")):
            collapsed += [alarm for step in (6, 7) for alarm in (gauge.step(step) or same).alarms]
    assert other is not None
    assert other.alarms == (), "it may be planned, and the loss is not known"
    (alarm,) = other.notes
    assert (alarm.name, alarm.component, alarm.layer) == ("model_changed", "skip", None)
    assert "the skips carry 0.5 of the stream instead of 1 in blocks 0 to 1" in alarm.sentence
    (fallen,) = [alarm for alarm in collapsed if alarm.name == "token_collapse"]
    start = readings[0].values("relative_residual")[fallen.layer or 0]
    assert fallen.evidence["at_start"] == pytest.approx(start), "the start of the run, not of the session"
    assert [reading.step for reading in read_record(tmp_path).readings] == [*range(8)]
    assert math.isclose(read_record(tmp_path).facts["structure"]["gains"]["/0"], 0.5, rel_tol=1e-4)


def trained(change: Any, *, build: Any = gpt2, steps: int = 44, options: Any = None) -> list[Alarm]:
    """The alarms of a small training, read at every second step."""
    return alarms_raised(build(dropout=0.0), change, steps=steps, every=2, **(options or {}))


def setting(name: str, value: Any) -> Any:
    def change(model: Any, optimizer: Any, step: int) -> None:
        if step >= 24:
            optimizer.param_groups[0][name] = value

    return change


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "value", "component", "words"),
    [
        ("weight_decay", 100.0, "optimizer", "weight_decay is 100 instead of 0.01 since step 24"),
        ("betas", (0.9, 0.0), "optimizer", "betas[1] is 0 instead of 0.999 since step 24"),
    ],
)  # fmt: skip
def test_setting_of_the_optimizer_that_changes_is_the_cause(name: str, value: Any, component: str, words: str) -> None:
    found = [alarm for alarm in trained(setting(name, value), steps=72) if alarm.step >= 24 and alarm.state == "raised"]
    assert found
    assert found[0].component == component
    assert words in found[0].sentence


def test_settings_that_follow_a_cycle_are_not() -> None:
    """Hostile case: momentum is lowered and decay raised at every step, and then the weights are replaced."""

    def change(model: Any, optimizer: Any, step: int) -> None:
        optimizer.param_groups[0].update(betas=(0.95 - 0.01 * (step % 20), 0.999), weight_decay=0.01 * 1.2**step)
        if step == 36:
            model.transformer.wte.weight.data.mul_(30.0)

    named = [alarm for alarm in trained(change) if not ALARMS[alarm.name].is_note]
    assert {alarm.component for alarm in named} == {"weights"}


def test_gradient_that_is_exactly_zero_is_named() -> None:
    (alarm,) = trained(lambda model, optimizer, step: 0.0 if step >= 24 else 1.0)
    assert (alarm.name, alarm.component) == ("still_weights", "gradients")
    assert "the gradient of every parameter is exactly zero" in alarm.sentence


def test_margin_that_all_inputs_keep_is_no_fault() -> None:
    """Hostile case: the gradient is exactly zero, after it became smaller and smaller."""
    assert trained(lambda model, optimizer, step: max(0.0, 1.0 - step / 24)) == []


def test_weights_of_another_dtype_are_a_change_of_the_model() -> None:
    def change(model: Any, optimizer: Any, step: int) -> None:
        if step == 24:
            model.to(torch.bfloat16)
            optimizer.state.clear()

    found = [alarm for alarm in trained(change) if alarm.name == "model_changed"]
    assert [alarm.component for alarm in found] == ["numbers"]
    assert "bfloat16 instead of float32" in found[0].sentence


def test_batch_that_is_not_finite_is_the_cause_of_what_is_not() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.blocks, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)

        def forward(self, patches: Tensor) -> Tensor:
            return self.head(self.blocks(patches).mean(1))

    torch.manual_seed(0)
    model = Patches().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found: list[Alarm] = []
    with Gauge(model, torch.randn(8, 6, 16), schedule=1, actions=(), alarms=("not_finite",), strict=True) as gauge:
        for step in range(6):
            x = torch.randn(8, 6, 16)
            x[0, 0, 0] = math.nan if step >= 4 else 0.0
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), torch.arange(8) % 3)
            loss.backward()
            gauge.after_backward(step)
            optimizer.step()
            reading = gauge.step(step, loss=loss, batch=x)
            found += [] if reading is None else reading.alarms
    assert [(alarm.step, alarm.component) for alarm in found] == [(4, "data")]
