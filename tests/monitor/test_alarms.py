from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from rankscope.errors import UnknownNameError
from rankscope.monitor.alarms import ALARMS, AlarmSpec, LayerState, LevelChange
from rankscope.monitor.alarms._spec import DEEP, TRANSIENT, TRANSIENT_STEPS, Judgement
from rankscope.monitor.probing import chosen_metrics
from rankscope.monitor.readings import Alarm, LayerValue
from rankscope.monitor.watching import AlarmWatch, Cause, References, chosen_alarms, random_null
from rankscope.verdicts.states import COLLAPSED_RESIDUAL

NULL = {
    "relative_residual": 0.98,
    "attention_entropy": 0.9,
    "largest_token_share": 0.05,
    "largest_channel_share": 0.04,
}
HEALTHY = {
    "relative_residual": 0.8,
    "inputs_relative_residual": 0.2,
    "inputs_averaging_residual": 0.05,
    "attention_entropy": 0.9,
    "qk_to_v_gradient": 0.1,
    "largest_token_share": 0.05,
    "largest_channel_share": 0.05,
    "not_finite": 0.0,
    "gradients_not_finite": 0.0,
    "batch_copies": 0.0,
    "batch_padding": 0.2,
    "batch_surprise": 3.0,
    "weight_norm": 1.0,
    "weight_motion": 1e-3,
    "structure_changes": 0.0,
    "still_steps": 0.0,
    "weights_moved": 1.0,
    "loss_now": 2.0,
    "weights_written": 0.3,
    "loss_level": 2.0,
    "loss_spread": 0.1,
    "shown_faults": 0.0,
    "gradient_carried": 0.0,
    "gradient_underflow": 0.05,
    "settings_contradiction": 0.1,
    "answers_alike": 16.0,
    "answers_loss": 1.2,
    "mean_answer_loss": 1.3,
}
BAD = {
    "token_collapse": {"relative_residual": 0.05},
    "entropy_collapse": {"attention_entropy": 0.05},
    "vanishing_qk_gradients": {"qk_to_v_gradient": 1e-3},
    "sink_domination": {"largest_token_share": 0.9},
    "channel_domination": {"largest_channel_share": 0.9},
    "input_collapse": {"inputs_relative_residual": 0.015},
    "not_finite": {"not_finite": 0.5},
    "not_finite_gradients": {"gradients_not_finite": 3.0},
    "repeated_sequences": {"batch_copies": 1.0},
    "padding_only": {"batch_padding": 1.0},
    "sudden_change": {"weight_norm": 9.0},
    "data_shift": {"batch_surprise": 9.0},
    "model_changed": {"structure_changes": 1.0},
    "update_growth": {"weight_motion": 2e-2},
    "still_weights": {"still_steps": 32.0},
    "loss_shift": {"loss_now": 4.0},
    "shown_faults": {"shown_faults": 1.0},
    "weights_replaced": {"weights_written": 3.0},
    "kept_gradients": {"gradient_carried": 0.5},
    "gradient_underflow": {"gradient_underflow": 0.9},
    "optimizer_settings": {"settings_contradiction": 12.0},
    "constant_answer": {"answers_alike": 200.0},
}


def state(now: Mapping[str, float], start: Mapping[str, float] = HEALTHY) -> LayerState:
    largest = {metric: max(value, 0.1) for metric, value in start.items()}
    changes = {
        metric: LevelChange(10.0 if value == 9.0 else 1.0, start.get(metric, math.nan))
        for metric, value in now.items()
        if metric in ("weight_norm", "batch_surprise")
    }
    return LayerState(now, start, NULL, largest, changes=changes, highest=start, peak=start)


def severity(spec: AlarmSpec, now: Mapping[str, float], start: Mapping[str, float] = HEALTHY) -> float:
    judged = spec.rule(state({**HEALTHY, **now}, {**HEALTHY, **start}))
    assert judged is not None
    return judged.severity


def test_there_are_alarms_for_each_kind_of_trouble() -> None:
    assert set(ALARMS) == set(BAD)


@pytest.mark.parametrize("name", BAD)
def test_trouble_is_beyond_the_threshold_and_health_is_not(name: str) -> None:
    assert severity(ALARMS[name], BAD[name]) > 1.0
    for other in BAD:
        if other != name:
            assert severity(ALARMS[other], BAD[name]) < ALARMS[other].release
    assert severity(ALARMS[name], {}) < ALARMS[name].release


def test_a_jump_of_a_loss_that_stays_low_is_none() -> None:
    jump = {"loss_now": 0.13, "loss_level": 0.03, "loss_spread": 0.01}
    assert severity(ALARMS["loss_shift"], jump) > 1.0, "where the run began is not known"
    assert severity(ALARMS["loss_shift"], jump, {"loss": 0.7}) == 0.0
    assert severity(ALARMS["loss_shift"], {**jump, "loss_now": 0.2}, {"loss": 0.7}) > 1.0


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
    if name != "shown_faults":  # said in the words of the doctor
        assert any(f"{value:{form}}" in judged.words for form in (".2g", ".0f", ".0%", ".1%"))


def test_thresholds_of_token_collapse_are_where_they_are_said_to_be() -> None:
    spec = ALARMS["token_collapse"]
    assert severity(spec, {"relative_residual": COLLAPSED_RESIDUAL}, {"relative_residual": 0.2}) == pytest.approx(1.0)
    # a fall to a tenth of the start counts only below half of what random tokens read
    assert severity(spec, {"relative_residual": 0.1 * 0.8}) == pytest.approx(1.0)
    assert severity(spec, {"relative_residual": 0.55}, {"relative_residual": 5.0}) < 1.0
    # a run that starts collapsed is alarmed by the null alone
    assert severity(spec, {"relative_residual": 1e-7}, {"relative_residual": 1e-7}) > 1.0
    assert severity(spec, {"relative_residual": 0.0}) == math.inf


def test_inputs_that_agree_because_they_are_long_means_are_no_alarm() -> None:
    spec = ALARMS["input_collapse"]
    assert severity(spec, {"inputs_relative_residual": 0.02}) > 1.0
    assert severity(spec, {"inputs_relative_residual": 0.02, "inputs_averaging_residual": 0.03}) == 0.0
    assert severity(spec, {"inputs_relative_residual": 0.02, "inputs_averaging_residual": math.nan}) > 1.0
    fallen = {"inputs_relative_residual": 0.09, "inputs_averaging_residual": math.nan}
    assert severity(spec, fallen, {"inputs_relative_residual": 0.95}) > 1.0


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
    spec = ALARMS["vanishing_qk_gradients"]
    judged = [spec.rule(state({"qk_to_v_gradient": q, "v_gradient": 1.0}, {"qk_to_v_gradient": 0.26}))
              for q in (0.0041, 1e-4, 0.0)]  # fmt: skip
    assert [one is not None and one.severity > 1.0 and one.may_pass for one in judged] == [True, False, False]


def test_massive_token_that_was_there_from_the_start_is_no_alarm() -> None:
    for name, metric in (("sink_domination", "largest_token_share"), ("channel_domination", "largest_channel_share")):
        assert severity(ALARMS[name], {metric: 0.98}, {metric: 0.97}) < 1.0
        assert severity(ALARMS[name], {metric: 0.98}, {metric: 0.1}) > 1.0


def test_mild_collapse_that_clears_by_itself_is_no_alarm_and_one_that_lasts_is() -> None:
    """Hostile case: a healthy model that learns how frequent tokens are, from 0.8 to 0.07 and back."""
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    every = math.ceil(TRANSIENT_STEPS / (TRANSIENT - 1))
    passing = [0.8, 0.3, *[0.07] * (TRANSIENT - 1), 0.3, 0.8]
    assert not any(look(watch, every * number, {0: value}) for number, value in enumerate(passing))
    # readings after every step are many, and the phase is as long as before
    assert not any(look(watch, step, {0: 0.07}) for step in range(5000, 5000 + 4 * TRANSIENT))
    look(watch, 6000, {0: 0.8})
    found = [look(watch, 7000 + every * number, {0: 0.07}) for number in range(TRANSIENT)]
    assert [len(alarms) for alarms in found] == [0] * (TRANSIENT - 1) + [1]
    # what has lasted may have fallen back a little behind the threshold: 0.1 has severity 0.8
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    found = [look(watch, every * n, {0: 0.07 if n == 0 else 0.1, 1: 0.9}) for n in range(TRANSIENT)]
    assert [alarm.layer for alarms in found for alarm in alarms] == [0]


def look(watch: AlarmWatch, step: int, residuals: Mapping[int, float], component: str = "skip") -> tuple[Alarm, ...]:
    states = {(None, layer): state({"relative_residual": value}) for layer, value in residuals.items()}
    return watch.look(step, states, lambda spec, stack, layer: Cause(component, f"{component} did it."))


def test_alarm_needs_two_readings_in_a_row_and_is_raised_once() -> None:
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    values = [0.005, 0.8, 0.005, 0.005, 0.005, 0.005]
    found = [look(watch, step, {0: value}) for step, value in enumerate(values)]
    assert [len(alarms) for alarms in found] == [0, 0, 0, 1, 0, 0]
    assert watch.active == ("token_collapse",)


def test_alarm_is_over_only_well_below_the_threshold_and_for_two_readings() -> None:
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    for step in range(2):
        look(watch, step, {0: 0.005})
    just_below = {0: 0.1}  # severity 0.8: between release and 1
    assert not any(look(watch, step, just_below) for step in range(2, 8))
    assert watch.active
    assert not look(watch, 8, {0: 0.9})
    (over,) = look(watch, 9, {0: 0.9})
    assert over.state == "cleared"
    assert watch.active == ()
    assert not look(watch, 10, {0: 0.005})
    (again,) = look(watch, 11, {0: 0.005})
    assert again.state == "raised"


def test_alarm_tells_first_layer_worst_layer_and_component() -> None:
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    look(watch, 10, {0: 0.9, 1: 0.05, 2: 1e-4, 3: 0.9})
    (alarm,) = look(watch, 20, {0: 0.9, 1: 0.05, 2: 1e-4, 3: 0.9}, component="attention")
    assert (alarm.layer, alarm.step, alarm.component) == (1, 20, "attention")
    assert alarm.evidence["relative_residual"] == 0.05
    assert alarm.evidence["worst_layer"] == 2.0
    assert alarm.evidence["worst_relative_residual"] == 1e-4
    for word in ("block 1", "step 20", "0.05", "block 2", "0.0001", "attention"):
        assert word in alarm.sentence


def test_null_of_random_tokens_and_scores_is_what_theory_says() -> None:
    null = random_null(chosen_metrics(None), {(64, 48)})
    assert null["relative_residual"] == pytest.approx(math.sqrt(1 - 1 / 64), abs=0.01)
    assert null["mean_cosine"] == pytest.approx(0.0, abs=0.02)
    # log of a sum of log-normals: entropy log n - 1/2 in the limit
    assert null["attention_entropy"] == pytest.approx(1 - 0.5 / math.log(64), abs=0.02)
    assert random_null(chosen_metrics(None), {(64, 48)}) == null


def test_inputs_that_fell_to_a_quarter_are_collapsed_once_the_gradient_has_vanished() -> None:
    rule = ALARMS["input_collapse"].rule
    now = {"inputs_relative_residual": 0.05, "inputs_averaging_residual": 0.06}
    for settled, severity in ((False, 0.0), (True, 1.0)):
        judged = rule(LayerState(now, {}, NULL, {}, highest={"inputs_relative_residual": 0.2}, settled=settled))
        assert judged is not None
        assert judged.severity == pytest.approx(severity)
        assert not judged.may_pass


def test_growth_on_a_grid_that_gets_coarser_allows_for_a_linear_warm_up() -> None:
    references, steps = References(), [*range(9), *(2**k * n // 4 for k in range(4, 11) for n in (4, 5, 6, 7))]
    for step in steps:
        references.take([LayerValue("weight_motion", "block.weights", None, 0, *(1e-4 * (step + 1),) * 3)], step)
        table = [LayerValue("weight_motion", "block.weights", None, 0, *(1e-4 * (step + 1),) * 3)]
        judged = ALARMS["update_growth"].rule(references.states(table)[None, 0])
        assert judged is None or judged.severity < 1.0, step


def test_a_silenced_alarm_is_neither_raised_nor_active() -> None:
    watch = AlarmWatch(chosen_alarms(["token_collapse"]))
    watch.silence(["token_collapse"])
    assert not any(look(watch, step, {0: 0.005}) for step in range(4))
    assert watch.active == ()
    with pytest.raises(UnknownNameError):
        watch.silence(["token_colapse"])
