"""The record of a gauge in the report: what was read, what was alarmed, and nothing a stranger may slip in."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rankscope
from rankscope.errors import ResultError
from rankscope.monitor.readings import (
    FAULTS,
    LAYERS_READ,
    LOSS,
    SOON,
    Alarm,
    LayerValue,
    Reading,
    fact,
)
from rankscope.monitor.record import Record, read_record
from rankscope.reporting.page.charts import Chart
from rankscope.reporting.page.gauge_chapter import training_chapter
from tests.runs.builders import write_sealed

SCRIPT = "<script>alert('x')</script>"


def alarm(step: int, state: Any = "raised", name: str = "token_collapse", layer: int = 1) -> Alarm:
    sentence = f"Tokens collapse at block {layer}, step {step}."
    return Alarm(name, state, step, None, layer, sentence, {"value": 0.01}, "skip")


def reading(step: int, levels: list[float], **more: Any) -> Reading:
    table = tuple(LayerValue("relative_residual", "block.out", None, i, v, v, v) for i, v in enumerate(levels))
    return Reading(step, {LOSS: 3.0 - step / 1000}, table, time=1000.0 + step, seconds=0.5, **more)


def record(*readings: Reading, torn: int = 0, name: str = "run") -> Record:
    return Record({"model": "GPT2LMHeadModel", "schedule": "every 10"}, readings, torn, name)


def collapsing() -> Record:
    return record(
        reading(0, [0.9, 0.8]),
        reading(10, [0.8, 1e-6], alarms=(alarm(10),), active=("token_collapse",)),
        reading(20, [0.8, 1e-7], active=("token_collapse",)),
    )


def charts_of(found: Record) -> dict[str, Any]:
    chapter = training_chapter(found)
    return {
        part.title: part.payload() for section in chapter.sections for part in section.parts if isinstance(part, Chart)
    }


def test_a_collapse_is_the_headline() -> None:
    chapter = training_chapter(collapsing())
    assert chapter.headline == "Token collapse at step 10, block 1"
    assert chapter.state == "bad"
    assert ("cost", "1.50 s of 20.5 s") in chapter.tiles


def test_the_origin_says_which_blocks_were_read_on_how_many_ranks_and_what_was_not() -> None:
    missed = {"not_read": {"attention_entropy": "fused"}, "not_watched": {"still_weights": "?", "padding_only": "?"}}
    ranks = {"rank 0": (12.0, "ok"), "rank 1": (11.0, "1 of 12 layers not read")}
    rows = tuple(
        LayerValue(LAYERS_READ, name, None, None, read, read, 12.0, status) for name, (read, status) in ranks.items()
    )
    origin = training_chapter(Record({"ranks": 2, "status": missed}, (Reading(0, {}, rows),), 0)).origin
    assert origin[-3:] == [
        ("blocks read", "11 of 12 on 1 of 2 ranks"),
        ("not read", "attention entropy (fused)"),
        ("not watched", "still weights, padding only (?)"),
    ]
    for status in ("x", {"not_read": 3}, {"not_read": ["x"]}):
        training_chapter(Record({"status": status}, (), 0))


def test_a_fault_is_told_as_it_is_and_alarms_are_bars_with_their_causes() -> None:
    fault = replace(
        alarm(0), name=FAULTS, layer=None, sentence="The model has a fault, step 0: No skips.\nHint: x + f(x)."
    )
    readings = (
        reading(0, [0.9, 0.8], alarms=(fault,)),
        reading(10, [0.8, 1e-6], alarms=(replace(alarm(10), component="skip"),), active=("token_collapse",)),
        reading(20, [0.8, 0.9], alarms=(alarm(20, "cleared"),)),
        reading(30, [0.8, 0.9], alarms=(replace(alarm(30, name="still_weights"), component="rate"),)),
    )
    found = record(*readings)
    chapter = training_chapter(found)
    assert chapter.headline == "No skips."
    assert chapter.verdict == [
        "Hint: x + f(x).",
        "3 alarms, 2 causes over steps 0 to 30; standing at the end: the fault.",
    ]
    assert chapter.sections[-1].title == "3 alarms, 2 causes"
    assert charts_of(found)["When each was raised"]["views"][0]["bars"] == [
        ["shown faults", 0, None, "skip"],
        ["token collapse", 10, 20, "skip"],
        ["still weights", 30, None, "rate"],
    ]
    unknown = training_chapter(record(reading(0, [0.1], alarms=(replace(alarm(0), component="unknown"),))))
    assert unknown.sections[-1].title == "1 alarm, 1 not explained"


def test_a_run_without_an_alarm_says_so() -> None:
    chapter = training_chapter(record(*(reading(step, [0.9]) for step in range(8))))
    assert (chapter.headline, chapter.state) == ("No alarm", "good")
    assert "steps 0 to 7" in chapter.verdict[0]
    assert [section.title for section in chapter.sections] == ["The loss", "Layer by layer over training"]


def test_few_readings_without_an_alarm_are_called_neither_good_nor_bad() -> None:
    chapter = training_chapter(record(reading(0, [0.9])))
    assert (chapter.headline, chapter.state) == ("Too few readings to judge", "plain")


def test_a_loss_that_is_stuck_is_not_good() -> None:
    readings = [reading(step, [0.9]) for step in range(8)]
    stuck = replace(readings[-1], table=(*readings[-1].table, fact("answers_alike", "loss", SOON)))
    chapter = training_chapter(record(*readings[:-1], stuck))
    assert (chapter.headline, chapter.state) == ("Predicts no better than a constant so far", "plain")
    assert chapter.verdict == ["No alarm in 8 readings over steps 0 to 7, but the loss does not fall so far."]


def test_an_alarm_that_is_over_asks_for_care() -> None:
    over = record(
        reading(0, [0.1], alarms=(alarm(0),), active=("token_collapse",)),
        reading(1, [0.9], alarms=(alarm(1, "cleared"),)),
    )
    chapter = training_chapter(over)
    assert chapter.state == "care"
    assert chapter.verdict[-1] == "1 alarm, 1 cause over steps 0 to 1; none stands at the end."


def test_the_map_has_blocks_upwards_and_rings_where_the_alarm_was_raised() -> None:
    view = charts_of(collapsing())["Layers over training"]["views"][0]
    assert view["rows"] == [1, 0]
    assert view["columns"] == [0, 10, 20]
    assert view["values"] == [[0.8, 1e-6, 1e-7], [0.9, 0.8, 0.8]]
    assert view["marks"] == [[0, 1, "token collapse"]]
    assert view["log"] is True


def test_a_ring_stays_where_its_step_was_when_columns_are_thinned() -> None:
    readings = [reading(step, [0.9, 0.8]) for step in range(1000)]
    readings[501] = reading(501, [0.9, 0.1], alarms=(alarm(501),))
    view = charts_of(record(*readings))["Layers over training"]["views"][0]
    assert len(view["columns"]) <= 256
    (row, column, _name) = view["marks"][0]
    assert (row, view["columns"][column]) == (0, 500)


def test_the_loss_is_shown_with_the_moment_of_the_alarm() -> None:
    view = charts_of(collapsing())["Loss"]["views"][0]
    assert view["series"][0]["y"] == [3.0, 2.99, 2.98]
    assert view["when"] == [[10, "token collapse"]]


def test_torn_lines_are_told() -> None:
    assert "2 lines were cut off" in training_chapter(record(reading(0, [0.9]), torn=2)).notes[0]


def test_a_folder_of_a_gauge_is_reported_beside_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "gauge"
    folder.mkdir()
    facts = {"rankscope_gauge": 1, "model": f"Net{SCRIPT}", "status": {"not_read": {SCRIPT: SCRIPT}}}
    lines = [facts, *(one.to_json() for one in collapsing().readings)]
    write_sealed(folder / "readings-00000.jsonl", *lines)
    run = rankscope.measure("init:tiny-bert", rankscope.Inputs(sequences=1, tokens=8))
    page = rankscope.report([run, folder], tmp_path / "page.html").read_text()
    assert "Token collapse at step 10, block 1" in page
    assert "monitor · gauge" in page
    assert SCRIPT not in page


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultError):
        rankscope.report(tmp_path, tmp_path / "page.html")


def test_the_gauge_keeps_the_loss_it_is_told(tmp_path: Path) -> None:
    from rankscope.models.loading import load
    from rankscope.monitor import Gauge

    with Gauge(
        load("init:tiny-bert").model, rankscope.Inputs(sequences=1, tokens=8), schedule=1, record=tmp_path, strict=True
    ) as gauge:
        gauge.step(0, loss=2.5)
        gauge.step(1)
        gauge.step(2, loss=math.nan)
    kept = [reading.scalars.get(LOSS) for reading in read_record(tmp_path).readings]
    assert kept == [2.5, None, None]
