from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from rankscope.errors import UnknownNameError
from rankscope.monitor.alarms import ALARMS, AlarmSpec, LayerState
from rankscope.monitor.alarms._spec import DEEP, TRANSIENT, TRANSIENT_STEPS, Judgement
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
    return LayerState(now, start, highest=start)


def severity(spec: AlarmSpec, now: Mapping[str, float], start: Mapping[str, float] = HEALTHY) -> float:
    judged = spec.rule(state({**HEALTHY, **now}, {**HEALTHY, **start}))
    assert judged is not None
    return judged.severity


def test_there_are_alarms_for_each_kind_of_trouble() -> None:
    assert set(ALARMS) == set(BAD)


@pytest.mark.parametrize("name", BAD)
def test_trouble_is_beyond_the_threshold_and_health_is_not(name: str) -> None:
    assert severity(ALARMS[name], BAD[name]) >= 1.0
    for other in BAD:
        if other != name:
            assert severity(ALARMS[other], BAD[name]) < ALARMS[other].release
    assert severity(ALARMS[name], {}) < ALARMS[name].release


@pytest.mark.parametrize("name", BAD)
def test_what_was_not_measured_is_not_judged(name: str) -> None:
    metrics = (*ALARMS[name].metrics, *(("relative_residual",) if name == "not_finite" else ()))
    rest = {key: value for key, value in HEALTHY.items() if key not in metrics}
    assert ALARMS[name].rule(state(rest)) is None
    assert ALARMS[name].rule(state({**rest, **dict.fromkeys(metrics, math.nan)})) is None


@pytest.mark.parametrize("name", BAD)
def test_evidence_holds_the_value_and_its_references(name: str) -> None:
    judged = ALARMS[name].rule(state({**HEALTHY, **BAD[name]}))
    assert judged is not None
    ((metric, value),) = BAD[name].items()
    assert judged.evidence[metric] == value
    if name not in ("shown_faults", "loss_rises"):  # said in the words of the doctor, and by the loss itself
        assert any(f"{value:{form}}" in judged.words for form in (".2g", ".0f", ".0%", ".1%"))


def test_thresholds_of_token_collapse_are_those_of_every_verb_whatever_the_run_began_with() -> None:
    spec = ALARMS["token_collapse"]
    for start in (1e-7, 0.2, 5.0):
        found = severity(spec, {"relative_residual": COLLAPSED_RESIDUAL}, {"relative_residual": start})
        assert found == pytest.approx(1.0)
    assert severity(spec, {"relative_residual": 0.0}) == math.inf


def test_inputs_that_agree_because_they_are_long_means_are_no_alarm() -> None:
    spec = ALARMS["input_collapse"]
    assert severity(spec, {"inputs_relative_residual": 0.02}) > 1.0
    assert severity(spec, {"inputs_relative_residual": 0.02, "inputs_averaging_residual": 0.03}) == 0.0
    assert severity(spec, {"inputs_relative_residual": 0.02, "inputs_averaging_residual": math.nan}) > 1.0
    fallen = {"inputs_relative_residual": 0.09, "inputs_averaging_residual": math.nan}
    assert severity(spec, fallen, {"inputs_relative_residual": 0.95}) < 1.0, "absolute"


def test_inputs_as_far_apart_as_ever_beside_a_common_vector_that_grows_need_patience() -> None:
    """Hostile healthy case, with the numbers of a run whose embeddings are scaled to length one after every step."""
    start = {"inputs_relative_residual": 0.109, "relative_residual": 0.931, "stream_rms": 1.11}
    now = {"inputs_relative_residual": 0.011, "relative_residual": 0.247, "stream_rms": 3.73}

    def judged(now: Mapping[str, float], *, settled: bool = False) -> Judgement:
        given = {**HEALTHY, "inputs_averaging_residual": 0.052, **now}
        found = ALARMS["input_collapse"].rule(replace(state(given, {**HEALTHY, **start}), settled=settled))
        assert found is not None
        assert found.severity > 1.0
        return found

    assert judged(now).may_pass
    assert not judged(now, settled=True).may_pass, "the gradient has vanished: it does not pass"
    assert not judged({**now, "stream_rms": 1.11}).may_pass, "a stream of the same size: the inputs themselves meet"


def test_inputs_that_begin_alike_and_tokens_that_pass_through_a_common_vector_need_patience() -> None:
    """Hostile healthy case: the token embedding begins 50 times smaller than the positions, and grows."""
    alike = {"inputs_relative_residual": 0.0012, "inputs_averaging_residual": 0.2}
    began = ALARMS["input_collapse"].rule(state({**HEALTHY, **alike}, {"inputs_relative_residual": 0.015}))
    assert began is not None
    assert (began.severity > DEEP, began.may_pass) == (True, True)
    fell = ALARMS["input_collapse"].rule(state({**HEALTHY, **alike}, {"inputs_relative_residual": 0.3}))
    further = ALARMS["input_collapse"].rule(
        state({**HEALTHY, **alike, "inputs_relative_residual": 1e-5}, {"inputs_relative_residual": 0.015})
    )
    assert fell is not None
    assert further is not None
    assert not fell.may_pass
    assert not further.may_pass, "far below where it began"


def test_mild_collapse_that_clears_by_itself_is_no_alarm_and_one_that_lasts_is() -> None:
    """Hostile case: a healthy model that learns how frequent tokens are, from 0.8 to 0.02 and back."""
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    every = math.ceil(TRANSIENT_STEPS / (TRANSIENT - 1))
    passing = [0.8, 0.3, *[0.02] * (TRANSIENT - 1), 0.3, 0.8]
    assert not any(look(watch, every * number, {0: value}) for number, value in enumerate(passing))
    # readings after every step are many, and the phase is as long as before
    assert not any(look(watch, step, {0: 0.02}) for step in range(5000, 5000 + 4 * TRANSIENT))
    look(watch, 6000, {0: 0.8})
    found = [look(watch, 7000 + every * number, {0: 0.02}) for number in range(TRANSIENT)]
    assert [len(alarms) for alarms in found] == [0] * (TRANSIENT - 1) + [1]
    # what has lasted may have fallen back a little behind the threshold: 0.0375 has severity 0.8
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    found = [look(watch, every * n, {0: 0.02 if n == 0 else 0.0375, 1: 0.9}) for n in range(TRANSIENT)]
    assert [alarm.layer for alarms in found for alarm in alarms] == [0]


def look(watch: AlarmWatch, step: int, residuals: Mapping[int, float], component: str = "skip") -> tuple[Alarm, ...]:
    states = {(None, layer): state({"relative_residual": value}) for layer, value in residuals.items()}
    return watch.look(step, states, lambda spec, judgement: (component, f"{component} did it."))


def test_alarm_needs_two_readings_in_a_row_and_is_raised_once() -> None:
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    values = [0.003, 0.8, 0.003, 0.003, 0.003, 0.003]
    found = [look(watch, step, {0: value}) for step, value in enumerate(values)]
    assert [len(alarms) for alarms in found] == [0, 0, 0, 1, 0, 0]
    assert watch.active == ("token_collapse",)


def test_alarm_is_over_only_well_below_the_threshold_and_for_two_readings() -> None:
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    for step in range(2):
        look(watch, step, {0: 0.003})
    just_below = {0: 0.0375}  # severity 0.8: between release and 1
    assert not any(look(watch, step, just_below) for step in range(2, 8))
    assert watch.active
    assert not look(watch, 8, {0: 0.9})
    (over,) = look(watch, 9, {0: 0.9})
    assert over.state == "cleared"
    assert watch.active == ()
    assert not look(watch, 10, {0: 0.003})
    (again,) = look(watch, 11, {0: 0.003})
    assert again.state == "raised"


def test_alarm_tells_first_layer_worst_layer_and_component() -> None:
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    look(watch, 10, {0: 0.9, 1: 0.003, 2: 1e-4, 3: 0.9})
    (alarm,) = look(watch, 20, {0: 0.9, 1: 0.003, 2: 1e-4, 3: 0.9}, component="attention")
    assert (alarm.layer, alarm.step, alarm.component) == (1, 20, "attention")
    assert alarm.evidence["relative_residual"] == 0.003
    assert alarm.evidence["worst_layer"] == 2.0
    assert alarm.evidence["worst_relative_residual"] == 1e-4
    for word in ("block 1", "step 20", "0.003", "block 2", "0.0001", "attention"):
        assert word in alarm.sentence


def test_a_silenced_alarm_is_neither_raised_nor_active() -> None:
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    watch.silence(["token_collapse"])
    assert not any(look(watch, step, {0: 0.003}) for step in range(4))
    assert watch.active == ()
    with pytest.raises(UnknownNameError):
        watch.silence(["token_colapse"])
