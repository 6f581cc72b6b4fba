from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from rankscope.errors import UnknownNameError
from rankscope.monitor.alarms import ALARMS, Breach, LayerState
from rankscope.monitor.alarms.states import DEEP, PASSING
from rankscope.monitor.readings import Alarm
from rankscope.monitor.watching import AlarmWatch, chosen_alarms
from rankscope.verdicts.states import COLLAPSED_RESIDUAL

HEALTHY = {
    "relative_residual": 0.8,
    "inputs_relative_residual": 0.2,
    "inputs_averaging_residual": 0.05,
    "attention_entropy": 0.9,
    "qk_to_v_gradient": 0.1,
    "v_gradient": 1.0,
    "not_finite": 0.0,
    "gradients_not_finite": 0.0,
    "batch_copies": 0.0,
    "batch_padding": 0.2,
    "still_steps": 0.0,
    "zero_steps": 0.0,
    "weights_moved": 1.0,
    "loss_risen": 0.3,
    "loss_before": 2.0,
    "loss_after": 2.1,
    "loss_since": 7.0,
    "shown_faults": 0.0,
    "gradient_carried": 0.0,
    "gradient_underflow": 0.05,
    "answers_alike": 16.0,
    "answers_loss": 1.2,
    "mean_answer_loss": 1.3,
}
BAD = {
    "token_collapse": {"relative_residual": 0.005},
    "entropy_collapse": {"attention_entropy": 0.005},
    "vanishing_qk_gradients": {"qk_to_v_gradient": 1e-9},
    "input_collapse": {"inputs_relative_residual": 0.015},
    "not_finite": {"not_finite": 0.5},
    "not_finite_gradients": {"gradients_not_finite": 3.0},
    "repeated_sequences": {"batch_copies": 1.0},
    "padding_only": {"batch_padding": 1.0},
    "still_weights": {"still_steps": 32.0},
    "loss_rises": {"loss_risen": 4.0},
    "shown_faults": {"shown_faults": 1.0},
    "kept_gradients": {"gradient_carried": 0.5},
    "gradient_underflow": {"gradient_underflow": 0.9},
    "constant_answer": {"answers_alike": 200.0},
}


def state(now: Mapping[str, float], start: Mapping[str, float] = HEALTHY) -> LayerState:
    return LayerState(now, {name: (value,) for name, value in start.items()})


def breach(name: str, now: Mapping[str, float], start: Mapping[str, float] = HEALTHY) -> Breach | None:
    return ALARMS[name].rule(state({**HEALTHY, **now}, {**HEALTHY, **start}))


def lasting(name: str, now: Mapping[str, float], start: Mapping[str, float] = HEALTHY, **more: bool) -> int:
    found = ALARMS[name].rule(replace(state({**HEALTHY, **now}, {**HEALTHY, **start}), **more))
    assert found is not None
    return found.lasting


def test_there_are_alarms_for_each_kind_of_trouble() -> None:
    assert set(ALARMS) == set(BAD)


@pytest.mark.parametrize("name", BAD)
def test_trouble_is_a_breach_of_its_own_alarm_alone_and_health_of_none(name: str) -> None:
    assert [other for other in BAD if breach(other, BAD[name]) is not None] == [name]
    assert breach(name, {}) is None


@pytest.mark.parametrize("name", BAD)
def test_what_was_not_measured_is_not_judged(name: str) -> None:
    rest = {key: value for key, value in HEALTHY.items() if key not in ALARMS[name].metrics}
    assert ALARMS[name].rule(state(rest)) is None
    assert ALARMS[name].rule(state({**rest, **dict.fromkeys(ALARMS[name].metrics, math.nan)})) is None


@pytest.mark.parametrize("name", BAD)
def test_evidence_holds_the_value_and_its_references(name: str) -> None:
    judged = breach(name, BAD[name])
    assert judged is not None
    ((metric, value),) = BAD[name].items()
    assert judged.evidence[metric] == value
    if name not in ("shown_faults", "loss_rises"):  # said in the words of the doctor, and by the loss itself
        assert any(f"{value:{form}}" in judged.words for form in (".2g", ".0f", ".0%", ".1%"))


def test_thresholds_of_token_collapse_are_those_of_every_verb_whatever_the_run_began_with() -> None:
    for start in (1e-7, 0.2, 5.0):
        for now, is_one in ((COLLAPSED_RESIDUAL, True), (1.01 * COLLAPSED_RESIDUAL, False), (0.0, True)):
            found = breach("token_collapse", {"relative_residual": now}, {"relative_residual": start})
            assert (found is not None) is is_one


def test_inputs_that_agree_because_they_are_long_means_are_no_alarm() -> None:
    close = {"inputs_relative_residual": 0.02}
    assert breach("input_collapse", close) is not None
    assert breach("input_collapse", {**close, "inputs_averaging_residual": 0.03}) is None
    assert breach("input_collapse", {**close, "inputs_averaging_residual": math.nan}) is not None
    fallen = {"inputs_relative_residual": 0.09, "inputs_averaging_residual": math.nan}
    assert breach("input_collapse", fallen, {"inputs_relative_residual": 0.95}) is None, "absolute"


@pytest.mark.parametrize(("name", "metric"), [
    ("token_collapse", "relative_residual"), ("input_collapse", "inputs_relative_residual")
])  # fmt: skip
def test_a_mild_collapse_has_to_last_and_a_deep_one_or_one_without_gradients_has_not(name: str, metric: str) -> None:
    """Hostile healthy case: a run whose embeddings are scaled to length one after every step, at 0.011."""
    mild, deep = {metric: 0.011}, {metric: 0.9 * COLLAPSED_RESIDUAL / DEEP}
    assert (lasting(name, mild), lasting(name, deep), lasting(name, mild, settled=True)) == (PASSING, 0, 0)


def test_inputs_that_begin_alike_need_patience() -> None:
    """Hostile healthy case: the token embedding begins 50 times smaller than the positions, and grows."""
    alike = {"inputs_relative_residual": 0.0012, "inputs_averaging_residual": 0.2}
    assert lasting("input_collapse", alike, {"inputs_relative_residual": 0.015}) == PASSING
    assert lasting("input_collapse", alike, {"inputs_relative_residual": 0.3}) == 0


def test_mild_collapse_that_clears_by_itself_is_no_alarm_and_one_that_lasts_is() -> None:
    """Hostile case: a healthy model that learns how frequent tokens are, from 0.8 to 0.02 and back."""
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    passing = [0.8, 0.3, *[0.02] * 9, 0.3, 0.8]
    assert not any(look(watch, 100 * number, {0: value}) for number, value in enumerate(passing))
    found = [look(watch, step, {0: 0.02}) for step in range(7000, 7000 + PASSING + 2)]
    assert [step for step, alarms in enumerate(found) if alarms] == [PASSING]


def test_still_weights_have_no_gradient_only_where_one_was_read_and_is_zero() -> None:
    still = {"still_steps": 32.0, "weights_moved": 0.0, "learning_rate": 1e-9}

    def words(**gradients: float) -> str:
        found = ALARMS["still_weights"].rule(LayerState({**still, **gradients}))
        assert found is not None
        return f"{found.component}: {found.words.rpartition('; ')[2]}"

    assert words() == words(total_gradient_norm=1.0) == "optimizer: the learning rate is 1e-09"
    said = "optimizer: the optimizer holds 50% of these parameters at a rate above 0"
    assert words(total_gradient_norm=1.0, weights_held=0.5) == said
    assert words(total_gradient_norm=1.0, blocks_with_gradient=0.0) == "gradients: they have no gradient"
    assert (
        words(parameters_with_gradient=0.0)
        == words(total_gradient_norm=0.0)
        == words(gradient_norm=0.0, total_gradient_norm=1.0)
    )


def look(watch: AlarmWatch, step: int, residuals: Mapping[int, float], component: str = "skip") -> tuple[Alarm, ...]:
    states = {(None, layer): state({"relative_residual": value}) for layer, value in residuals.items()}
    return watch.look(step, states, lambda spec, breach: (component, f"{component} did it."))


def test_alarm_needs_two_readings_in_a_row_and_is_raised_once() -> None:
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    values = [0.003, 0.8, 0.003, 0.003, 0.003, 0.003]
    found = [look(watch, step, {0: value}) for step, value in enumerate(values)]
    assert [len(alarms) for alarms in found] == [0, 0, 0, 1, 0, 0]
    assert watch.active == ("token_collapse",)


def test_alarm_is_over_after_two_readings_without_it_and_what_was_not_tested_says_nothing() -> None:
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    for step in range(2):
        look(watch, step, {0: 0.003})
    assert not any(look(watch, step, {0: math.nan}) for step in range(2, 8))
    assert not look(watch, 8, {0: 0.9})
    assert watch.active
    (over,) = look(watch, 9, {0: 0.9})
    assert over.state == "cleared"
    assert watch.active == ()
    assert not look(watch, 10, {0: 0.003})
    (again,) = look(watch, 11, {0: 0.003})
    assert again.state == "raised"


def test_alarm_tells_the_first_layer_the_others_and_the_component() -> None:
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    look(watch, 10, {0: 0.9, 1: 0.003, 2: 1e-4, 3: 0.9})
    (alarm,) = look(watch, 20, {0: 0.9, 1: 0.003, 2: 1e-4, 3: 0.9}, component="attention")
    assert (alarm.layer, alarm.step, alarm.component) == (1, 20, "attention")
    assert alarm.evidence["relative_residual"] == 0.003
    for word in ("block 1", "step 20", "0.003", "also at block 2", "attention"):
        assert word in alarm.sentence


def test_a_silenced_alarm_is_neither_raised_nor_active() -> None:
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    watch.silence(["token_collapse"])
    assert not any(look(watch, step, {0: 0.003}) for step in range(4))
    assert watch.active == ()
    with pytest.raises(UnknownNameError):
        watch.silence(["token_colapse"])
