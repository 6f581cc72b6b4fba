"""Flushed block statistics become a record, a run and a page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankscope as rs
from rankscope import blockstats
from rankscope.errors import ResultError
from rankscope.monitor.block_log import read_block_log


def line(step: int, residuals: list[float], bad: float = 0.0, **more: Any) -> str:
    values = {
        f"{name}/{layer}": value
        for layer, residual in enumerate(residuals)
        for name, value in (("relative_residual", residual), ("stream_rms", 1.0), ("tokens", 64.0), ("not_finite", bad))
    }
    return json.dumps({"step": step, **values, **more}) + "\n"


def written(folder: Path, *lines: str) -> Path:
    path = folder / "training.jsonl"
    path.write_text("".join(lines))
    return path


def test_what_a_training_flushed_becomes_a_page(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    stats = blockstats.attach(layers, 8)
    rows = []
    for step in range(10):
        stats.count()
        x = torch.randn(4, 6, 8)
        for layer in layers:
            x = x + layer(x)
        rows.append({"step": step, "loss": 3.0 - step / 10, **stats.flush()})
    path = written(tmp_path, *(json.dumps(row) + "\n" for row in rows))
    record, run = read_block_log(path)
    assert [reading.step for reading in record.readings] == list(range(10))
    assert record.readings[-1].values("between_groups")[2] == rows[-1]["between_groups/2"]
    assert record.alarms == ()
    assert run.code == "healthy"
    assert run.select(metric="stream_rms", layer=1)["value"].to_pylist() == [rows[-1]["stream_rms/1"]]
    page = rs.report(path, tmp_path / "page.html").read_text()
    for words in ("No alarm", "No collapse", "relative residual", "between groups", "Loss"):
        assert words in page


def test_alarms_begin_and_end(tmp_path: Path) -> None:
    fine, gone = [0.9, 0.8, 0.9], [0.9, 1e-4, 1e-6]
    lines = [line(0, fine), line(10, gone), line(20, gone), line(30, fine), line(40, fine, bad=2.0), line(50, fine)]
    record, run = read_block_log(written(tmp_path, *lines))
    assert [(alarm.name, alarm.state, alarm.step, alarm.layer) for alarm in record.alarms] == [
        ("token_collapse", "raised", 10, 2),
        ("token_collapse", "cleared", 30, 2),
        ("not_finite", "raised", 40, 0),
        ("not_finite", "cleared", 50, 0),
    ]
    assert record.readings[2].active == ("token_collapse",)
    assert run.code == "healthy"


def test_a_resumed_training_repeats_steps_and_logs_other_lines(tmp_path: Path) -> None:
    lines = [line(0, [0.9]), line(10, [0.8]), json.dumps({"step": 11, "loss": 1.0}) + "\n", "\n", line(10, [0.7])]
    record, _ = read_block_log(written(tmp_path, *lines))
    assert [reading.values("relative_residual") for reading in record.readings] == [{0: 0.9}, {0: 0.7}]


def test_a_block_without_a_finite_value(tmp_path: Path) -> None:
    record, run = read_block_log(written(tmp_path, line(0, [0.9, math.nan], bad=1.0)))
    assert [alarm.name for alarm in record.alarms] == ["not_finite"]
    assert run.table["status"].to_pylist() == ["ok", "not finite", "ok", "ok"]
    assert run.code == "not finite"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no block statistics"),
        ('{"step": 1}\n', "no block statistics"),
        ('{"relative_residual/0": 0.5}\n', "line 1 has no step"),
        ('{"step": true, "relative_residual/0": 0.5}\n', "line 1 has no step"),
        ('{"step": 1, "relative_residual/0": 0.5, "tok', "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ('{"step": 1, "relative_residual/0": "high"}\n', "line 1: a value is not a number"),
        ('{"step": 1, "relative_residual/0": [1]}\n', "line 1: a value is not a number"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ResultError, match=message):
        read_block_log(written(tmp_path, text))
    with pytest.raises(ResultError, match="cannot be read"):
        read_block_log(tmp_path / "missing.jsonl")
