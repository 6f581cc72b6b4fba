"""``rankscope remedy`` hands everything over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rankscope
from rankscope import Stream
from tests.flat_calls import handed_over
from tests.runs.builders import make_run, profile


def test_every_option_reaches_the_verb(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    def verb(*words: object, **options: object) -> object:
        given.update(options, words=words)
        return make_run(profile({"relative_residual": [0.9, 0.8]}).table())

    monkeypatch.setitem(vars(rankscope), "remedy", verb)
    text = tmp_path / "text.txt"
    text.write_text("words")
    options = "--remedies deepnorm,stronger_skip=3 --weights init --no-gradients"
    more = "--sequences 2 --tokens 16 --batch 1 --tokens-policy no-first --dtype float64 --device cpu --seed 7"
    last = "--blocks layers.* --random-tokens --quiet"
    words = [*f"{options} {more} {last}".split(), "--layout", "batch dim tokens"]
    outcome = cli("remedy", "init:tiny-bert", "--text", str(text), *words)
    assert outcome.code == 0
    found = handed_over(given.pop("words"), given)
    expected = {
        "source": "init:tiny-bert",
        "data": text,
        "remedies": ["deepnorm", "stronger_skip=3"],
        "weights": "init",
        "gradients": False,
        "sequences": 2,
        "tokens": 16,
        "batch": 1,
        "tokens_policy": "no-first",
        "random_tokens": True,
        "tokenizer": None,
        "dtype": "float64",
        "device": "cpu",
        "seed": 7,
        "parallel": None,
        "offload": False,
        "blocks": "layers.*",
        "stream": Stream("batch dim tokens"),
        "progress": False,
    }
    assert {name: found[name] for name in expected} == expected
