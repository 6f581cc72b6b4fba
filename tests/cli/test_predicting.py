"""``rankscope predict``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rankscope


@pytest.mark.slow
def test_the_command_answers_in_json_and_draws(cli, tmp_path: Path) -> None:
    figure = tmp_path / "curves.png"
    words = "--seeds 2 --tokens 12 --most-blocks 8 --json"
    outcome = cli("predict", "tiny-bert", *words.split(), "--figure", str(figure))
    answer = json.loads(outcome.out)
    assert answer["kind"] == "predict"
    assert answer["class"]["name"] == "order 1"
    assert figure.stat().st_size > 10_000
    shown = cli("predict", "tiny-bert", "--seeds", "1", "--tokens", "12", "--most-blocks", "4").out
    assert "mean field: tokens do not agree" in shown


def test_options_become_changes_of_the_design(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def fake(spec: str, changes: dict[str, object], **options: object) -> None:
        given.update(changes, spec=spec)
        raise rankscope.RankscopeError("enough")

    monkeypatch.setitem(vars(rankscope), "predict", fake)
    words = "--depth 4 --width 64 --heads 2 --mask causal --norm none --norm-place none --mlp relu --positions rope"
    outcome = cli("predict", "bert-base", *words.split(), "--skip", "0.5")
    assert outcome.code == 2
    expected = {"depth": 4, "width": 64, "heads": 2, "mask": "causal", "norm": "none", "norm_place": "none"}
    expected |= {"mlp": "relu", "positions": "rope", "skip_gain": 0.5}
    assert given.items() >= expected.items()
