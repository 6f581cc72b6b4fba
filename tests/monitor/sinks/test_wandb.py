"""Offline runs, read back through W&B's own message classes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.errors import InputError, MissingExtraError
from rankscope.monitor.sinks.wandb import STEP_NAME, WandbSink
from tests.monitor.sinks.readings import ALARM, SCALARS, SENTENCE, feed, wandb_records

wandb = pytest.importorskip("wandb")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = wandb.Settings(x_disable_stats=True, x_disable_meta=True, console="off", save_code=False)
    with wandb.init(mode="offline", dir=str(tmp_path), project="p", settings=settings) as begun:
        yield begun


def rows(folder: Path) -> list[dict[str, Any]]:
    """The history, row by row."""
    found = []
    for record in wandb_records(folder):
        if record.HasField("history"):
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            found.append(items)
    return found


def test_an_offline_run_holds_scalars_and_alarms(run: Any, tmp_path: Path) -> None:
    feed(WandbSink())
    run.finish()
    first, second, third = rows(tmp_path)
    assert (first[STEP_NAME], second[STEP_NAME], third[STEP_NAME]) == (10, 20, 30)
    assert {name: second[name] for name in SCALARS} == SCALARS
    assert second["rankscope/alarm/token_collapse"] == SENTENCE
    assert "rankscope/alarm/token_collapse" not in first
    alerts = [record.alert for record in wandb_records(tmp_path) if record.HasField("alert")]
    assert [(alert.title, alert.level) for alert in alerts] == [
        ("rankscope: token collapse raised at block 1", "WARN"),
        ("rankscope: token collapse cleared at block 1", "INFO"),
    ]


def test_charts_have_the_step_of_the_gauge_as_their_axis(run: Any, tmp_path: Path) -> None:
    WandbSink(run).scalars(7, SCALARS)
    run.finish()
    metrics = [record.metric for record in wandb_records(tmp_path) if record.HasField("metric")]
    assert any(metric.glob_name == "rankscope/*" and metric.step_metric == STEP_NAME for metric in metrics)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 4])
def test_the_steps_of_the_user_are_not_moved_on(run: Any, tmp_path: Path, every: int) -> None:
    """With a row of its own for each call the sink would push W&B's counter past the user's steps, which it drops."""
    sink = WandbSink(run)
    for step in range(9):
        if step % every == 0:
            run.log({"loss": float(step)}, step=step)
        sink.scalars(step, SCALARS)
        sink.alarm(step, ALARM)
    run.finish()
    found = rows(tmp_path)
    assert [row["loss"] for row in found if "loss" in row] == list(range(0, 9, every))
    assert [row[STEP_NAME] for row in found] == list(range(9))


def test_without_a_run_it_says_what_to_call() -> None:
    with pytest.raises(InputError, match=r"wandb\.init"):
        WandbSink()


def test_without_wandb_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rankscope\[wandb\]'"):
        WandbSink()
