from __future__ import annotations

import gc
import logging
import tracemalloc
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankscope as rs
from rankscope import Inputs, Surgery, load
from rankscope.errors import InputError, UnknownNameError
from rankscope.metrics import METRICS
from rankscope.monitor import Alarm, CollapseError, Gauge, read_record
from rankscope.monitor.probing import DEFAULT_METRICS
from rankscope.surgery.operating import operate
from rankscope.verbs.measure.run import measure
from tests.flat_calls import flat
from tests.monitor.trainings import bert, probe, train

COLLAPSING: dict[str, Any] = {"skip": 0.0, "mlp": "drop"}


class Listener:
    """A sink that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, Any]] = []
        self.closed = 0

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.told.append(("scalars", step, dict(values)))

    def alarm(self, step: int, alarm: Alarm) -> None:
        self.told.append(("alarm", step, alarm))

    def close(self) -> None:
        self.closed += 1

    def of(self, kind: str) -> list[tuple[int, Any]]:
        return [(step, what) for name, step, what in self.told if name == kind]


class Broken(Listener):
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("the dashboard is gone")


def test_numbers_are_those_of_measure() -> None:
    model = bert().eval()
    reading = Gauge(model, probe(), strict=True).step(0)
    assert reading is not None
    run = measure(model, probe(), metrics=DEFAULT_METRICS)
    for name in DEFAULT_METRICS:
        site = {"tokens": "block.out", "update": "block.update"}.get(METRICS[name].side, "attention.probs")
        for layer, value in reading.values(name).items():
            rows = [
                row["value"]
                for row in run.table.to_pylist()
                if (row["metric"], row["site"], row["layer"]) == (name, site, layer)
            ]
            assert value == pytest.approx(sum(rows) / len(rows), rel=1e-12)
            (kept,) = [row for row in reading.table if (row.metric, row.layer) == (name, layer)]
            assert (kept.least, kept.most) == (min(rows), max(rows))


def test_due_steps_only_and_each_once() -> None:
    gauge = Gauge(bert(), probe(), schedule=4, strict=True)
    assert gauge.is_due(0)
    assert gauge.is_due(0)
    assert gauge.step(0) is not None
    assert gauge.step(0) is None
    assert [step for step in range(1, 9) if gauge.step(step) is not None] == [4, 8]


def alarms_of(gauge: Gauge, model: nn.Module, steps: int = 3) -> None:
    with operate(model, Surgery(**COLLAPSING)):
        for step in range(steps):
            gauge.step(step)


def test_collapse_is_alarmed(caplog: pytest.LogCaptureFixture) -> None:
    model = bert(layers=6)
    heard: list[Alarm] = []
    gauge = Gauge(model, probe(), schedule=1, actions=("log", heard.append), strict=True)
    with caplog.at_level(logging.WARNING, "rankscope.monitor"):
        alarms_of(gauge, model)
    (alarm,) = [alarm for alarm in heard if alarm.name == "token_collapse"]
    assert alarm.state == "raised"
    assert alarm.step == 1
    assert alarm.sentence in caplog.text
    assert gauge.last is not None
    assert "token_collapse" in gauge.last.active
    assert gauge.last.scalars["rankscope/alarms"] >= 1.0
    assert not gauge.should_stop


@pytest.mark.slow
def test_stop_flags_and_raise_raises() -> None:
    model = bert(layers=6)
    gauge = Gauge(model, probe(), schedule=1, actions=("stop",), strict=True)
    alarms_of(gauge, model)
    assert gauge.should_stop
    with pytest.raises(CollapseError) as caught:
        alarms_of(Gauge(model, probe(), schedule=1, actions=("raise",)), model)
    assert caught.value.alarm.name == "token_collapse"


def test_healthy_training_is_not_alarmed() -> None:
    model = bert(layers=6)
    heard: list[Alarm] = []
    train(model, Gauge(model, probe(), schedule=1, actions=(heard.append,), strict=True), steps=12)
    assert heard == []


def test_error_is_reported_once_and_the_run_goes_on(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = bert()
    gauge = Gauge(rs.Model(model, blocks="nowhere.*"), probe(), schedule=1, record=tmp_path)
    with caplog.at_level(logging.ERROR, "rankscope.monitor"):
        for step in range(4):
            gauge.after_backward(step)
            assert gauge.step(step) is None
    gauge.close()
    assert gauge.disabled is not None
    assert "nowhere" in gauge.disabled
    assert len([entry for entry in caplog.records if entry.levelno >= logging.ERROR]) == 1
    assert "Traceback" in caplog.text
    assert model.training
    assert read_record(tmp_path).readings == ()


def test_error_is_raised_when_strict() -> None:
    gauge = Gauge(bert(), {"input_ids": torch.full((2, 4), 10**6)}, strict=True)
    with pytest.raises(InputError):
        gauge.step(0)


def test_broken_sink_is_dropped_and_the_others_go_on(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    good = Listener()
    gauge = Gauge(bert(), probe(), schedule=1, sinks=(Broken(), good), record=tmp_path)
    for step in range(3):
        assert gauge.step(step) is not None
    gauge.close()
    assert len([entry for entry in caplog.records if "Broken failed" in entry.message]) == 1
    assert "the dashboard is gone" in caplog.text
    assert [step for step, _ in good.of("scalars")] == [0, 1, 2]
    assert len(read_record(tmp_path).readings) == 3
    with pytest.raises(ConnectionError):
        Gauge(bert(), probe(), sinks=(Broken(),), strict=True).step(0)


@pytest.mark.slow
def test_sinks_get_at_most_eight_scalars_and_alarms() -> None:
    model, sink = bert(layers=6), Listener()
    with Gauge(model, probe(), schedule=1, sinks=(sink,), actions=(), strict=True) as gauge:
        alarms_of(gauge, model, steps=4)
        gauge.close()
    assert sink.closed == 1
    assert [step for step, _ in sink.of("scalars")] == list(range(4))
    assert ("token_collapse", 1) in [(alarm.name, step) for step, alarm in sink.of("alarm")]
    default = {"relative_residual/least", "attention_entropy/least", "stream_rms/most", "weight_motion/most", "alarms"}
    names = {name.removeprefix("rankscope/") for _, values in sink.of("scalars") for name in values}
    assert default <= names <= default | {"inputs_relative_residual/least", "qk_to_v_gradient/least", "loss"}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"metrics": ["stable_rnk"]}, UnknownNameError),
        ({"alarms": ["token_colapse"]}, UnknownNameError),
        ({"actions": ("stopp",)}, UnknownNameError),
        ({"actions": "stop"}, InputError),
        ({"actions": (3,)}, InputError),
        ({"sinks": (object(),)}, InputError),
        ({"schedule": "often"}, InputError),
    ],
)
def test_arguments_that_mean_nothing_are_refused_at_once(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        flat(Gauge, bert(), probe(), **options)


@pytest.mark.slow
def test_memory_stays_the_same_over_many_readings() -> None:
    gauge = Gauge(bert(layers=1), probe(), schedule=1, metrics=["mean_cosine"], strict=True)
    tracemalloc.start()
    held = []
    for stretch in range(4):
        for step in range(100 * stretch, 100 * stretch + 100):
            gauge.step(step)
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    # What a stretch keeps it keeps every time; a cache that fills in one of them does so once.
    grown = [after - before for before, after in pairwise(held)]
    assert min(grown) < 100 * 500  # a kept reading of one metric and layer is more than that


def test_steps_may_be_tensors_and_may_start_over_in_each_epoch(caplog: pytest.LogCaptureFixture) -> None:
    gauge = Gauge(bert(), probe(), schedule=2, strict=True)
    assert gauge.step(torch.tensor(0)) is not None  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "rankscope.monitor"):
        read = [reading.step for step in [1, 2, 3, 0, 1, 2, 3] if (reading := gauge.step(step)) is not None]
    assert read == [2, 4, 6]
    assert caplog.text.count("counts on") == 1


def test_action_that_fails_is_dropped_and_the_gauge_goes_on() -> None:
    def fails(alarm: Alarm) -> None:
        raise KeyError("mine")

    model, heard = bert(layers=6), []
    gauge = Gauge(model, probe(), schedule=1, actions=(fails, heard.append))
    alarms_of(gauge, model)
    assert heard
    assert gauge.disabled is None


def test_two_gauges_on_one_folder_are_refused(tmp_path: Path) -> None:
    first = Gauge(bert(), probe(), record=tmp_path)
    with pytest.raises(InputError, match="another gauge is writing"):
        Gauge(bert(), probe(), record=tmp_path)
    first.close()
    Gauge(bert(), probe(), record=tmp_path).close()


def test_each_metric_may_have_a_clock_of_its_own() -> None:
    with Gauge(
        load("init:tiny-bert"),
        Inputs(sequences=2, tokens=8),
        schedule=1,
        metrics={"relative_residual": 1, "effective_rank": 3, "attention_entropy": 4},
        strict=True,
    ) as gauge:
        readings = [gauge.step(step) for step in range(7)]
    assert all(reading is not None for reading in readings)
    steps = {
        name: [reading.step for reading in readings if reading and name in {row.metric for row in reading.table}]
        for name in ("relative_residual", "effective_rank", "attention_entropy")
    }
    assert steps == {"relative_residual": [*range(7)], "effective_rank": [0, 3, 6], "attention_entropy": [0, 4]}
    assert not any(reading.alarms for reading in readings if reading)
