"""``rankscope doctor RECORD``: why a recorded training went bad."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rankscope as rs


def recorded(folder: Path, *, clears: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with rs.watch(model, optimizer, record=folder, actions=()):
        for _ in range(16):
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            if clears:
                optimizer.zero_grad()


def test_a_record_is_asked_why(tmp_path: Path, cli: Callable[..., Any]) -> None:
    recorded(tmp_path / "kept", clears=False)
    recorded(tmp_path / "cleared", clears=True)
    bad = cli("doctor", str(tmp_path / "kept"))
    assert bad.code == 1
    assert "recorded: Gradients are not cleared" in bad.out.split("\n")[0]
    assert json.loads(cli("doctor", str(tmp_path / "kept"), "--json").out)["cause"]["name"] == "kept_gradients"
    good = cli("doctor", str(tmp_path / "cleared"))
    assert (good.code, good.out.split("\n")[0]) == (0, "No fault seen (12 readings).")


def test_a_record_that_was_changed_is_refused(tmp_path: Path, cli: Callable[..., Any]) -> None:
    recorded(tmp_path, clears=True)
    (line,) = tmp_path.glob("*.jsonl")
    line.write_text(line.read_text().replace('"step":0', '"step":7', 1))
    answer = cli("doctor", str(tmp_path))
    assert answer.code != 0
    assert "cannot be read" in answer.err


@pytest.mark.parametrize("given", ["init:tiny-bert"])
def test_a_model_is_still_examined(given: str, cli: Callable[..., Any]) -> None:
    assert "Went bad" not in cli("doctor", given).out
