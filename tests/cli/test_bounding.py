"""What ``rankscope bound`` hands to its verb and prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rankscope
from rankscope import Stream
from tests.flat_calls import handed_over


def test_bound_answers_in_json_with_a_theorem_in_every_row(cli, tmp_path: Path) -> None:
    figure = tmp_path / "bound.png"
    words = "--sequences 1 --tokens 10 --theorems contraction_interval,dong_2021_multi_head --json"
    outcome = cli("bound", "init:tiny-bert", *words.split(), "--figure", str(figure))
    assert outcome.code == 0
    answer = json.loads(outcome.out)
    assert answer["kind"] == "bound"
    assert {row["theorem"] for row in answer["rows"]} == {"contraction_interval", "dong_2021_multi_head"}
    assert set(answer["sentences"]) == {"contraction_interval", "dong_2021_multi_head"}
    assert figure.stat().st_size > 10_000


def test_bound_hands_over_every_option(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    def fake(*words: object, **options: object) -> object:
        given.update(options, words=words)
        raise rankscope.RankscopeError("enough")

    monkeypatch.setitem(vars(rankscope), "bound", fake)
    words = "--theorems a,b --theorems c --random-tokens --sequences 3 --tokens 9 --batch 2"
    outcome = cli(
        "bound",
        str(tmp_path),
        *words.split(),
        "--device",
        "cpu",
        "--dtype",
        "float64",
        "--seed",
        "5",
        "--blocks",
        "layers.*",
        "--layout",
        "batch dim tokens",
    )
    assert outcome.code == 2
    found = handed_over(given.pop("words"), given)
    expected = {
        "source": str(tmp_path),
        "data": None,
        "theorems": ["a", "b", "c"],
        "random_tokens": True,
        "tokenizer": None,
        "sequences": 3,
        "tokens": 9,
        "batch": 2,
        "dtype": "float64",
        "device": "cpu",
        "seed": 5,
        "blocks": "layers.*",
        "parallel": None,
        "stream": Stream("batch dim tokens"),
        "offload": False,
        "memory": None,
        "progress": False,
    }
    assert {name: found[name] for name in expected} == expected


def test_ls_theorems_lists_sources_and_sides(cli) -> None:
    answer = json.loads(cli("ls", "theorems", "--json").out)
    found = {entry["name"]: entry for entry in answer["entries"]}
    assert found["dong_2021_multi_head"]["cites"] == ["dong2021attention, cor. 2.3"]
    assert found["contraction_interval"]["sides"] == "two-sided"
