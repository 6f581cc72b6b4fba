"""``rankscope predict``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rankscope
from rankscope.ext.theory.predict import assignments


@pytest.mark.slow
def test_the_command_answers_in_json_and_draws(cli, tmp_path: Path) -> None:
    figure = tmp_path / "curves.png"
    words = "--seeds 2 --tokens 12 --most-blocks 8 --json"
    outcome = cli("predict", "tiny-bert", *words.split(), "--figure", str(figure))
    answer = json.loads(outcome.out)
    assert answer["kind"] == "predict"
    assert answer["class"]["name"] == "order 1"
    assert figure.stat().st_size > 10_000
    assert "mean_field" in cli("predict", "tiny-bert", "--seeds", "1", "--tokens", "12", "--most-blocks", "4").out


def test_options_become_changes_of_the_design(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def fake(spec: str, changes: dict[str, object], **options: object) -> None:
        given.update(changes, spec=spec)
        raise rankscope.RankscopeError("enough")

    monkeypatch.setitem(vars(rankscope), "predict", fake)
    words = "--depth 4 --width 64 --heads 2 --mask causal --norm none --norm-place none --mlp relu --positions rope"
    outcome = cli("predict", "bert-base", *words.split(), "--skip", "0.5", "--weight-std", "0.1", "--set", "kv_heads=1")
    assert outcome.code == 2
    expected = {"depth": 4, "width": 64, "heads": 2, "mask": "causal", "norm": "none", "norm_place": "none"}
    expected |= {"mlp": "relu", "positions": "rope", "skip_gain": 0.5, "weight_std": 0.1, "kv_heads": 1}
    assert given.items() >= expected.items()


def test_values_are_read_as_numbers_where_they_are() -> None:
    assert assignments(["a=1", "b=0.5", "c=x=y"]) == {"a": 1, "b": 0.5, "c": "x=y"}


def test_a_change_without_a_value_is_wrong_use(cli) -> None:
    assert cli("predict", "bert-base", "--set", "depth").code == 2
