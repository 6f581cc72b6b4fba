"""What is no model, no run and no input: each is refused in words that say what to pass, by every verb."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

import rankscope as rs
from rankscope.errors import InputError, LoadError, RankscopeError

MODEL = rs.load("init:tiny-bert").model
TOKENIZER = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
)
WRONG: dict[str, tuple[Any, str]] = {
    "a state dict": (MODEL.state_dict(), "load_state_dict, and pass the module"),
    "a dict": ({"model": "init:tiny-bert"}, "is a dict"),
    "a list": (["init:tiny-bert"], "is a list"),
    "None": (None, "is None"),
    "a configuration": (MODEL.config, "from_config"),
    "a tokenizer": (TOKENIZER, r"as Inputs\(tokenizer="),
    "a class": (torch.nn.Linear, "is the class Linear. *|Pass an instance"),
    "a tensor": (torch.zeros(2), "is a Tensor"),
    "a file": (Path(sys.executable), "is a file"),
    "a long text": ("a word " * 200, "a text of 1400 characters"),
    "a text no path can be": ("a\0b", "a text of 3 characters"),
    "a number": (3, "is an int"),
    "a function": (len, "is a builtin_function"),
    "bytes": (b"init:tiny-bert", "is a bytes"),
    "nothing": ("", "no file or folder"),
}
VERBS = ("load", "measure", "ablate", "exact", "decompose", "bound", "remedy", "doctor")


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("verb", VERBS)
def test_item_11_what_is_no_model_is_refused_in_words(verb: str, case: str) -> None:
    given, words = WRONG[case]
    with pytest.raises((InputError, LoadError), match=words):
        getattr(rs, verb)(given)


def operated(given: Any) -> None:
    with rs.operate(given, rs.Surgery(skip=0.0)):
        pass


OTHERS: dict[str, Callable[[Any], Any]] = {
    "predict": rs.predict,
    "measure, streamed": lambda given: rs.measure(rs.Model(given, offload=True)),
    "operate": operated,
    "Gauge": lambda given: rs.Gauge(given, None),
    "load_run": rs.load_run,
    "compare": lambda given: rs.compare(given, given),
    "report": lambda given: rs.report(given, "report.html"),
    "sweep": lambda given: rs.sweep(given, "folder", serial=True),
    "query": lambda given: rs.query(given, "SELECT 1"),
    "graph": lambda given: rs.graph(given, 4),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("verb", OTHERS)
def test_item_11_every_other_verb_refuses_in_words(
    verb: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if verb.startswith("predict") and case == "a configuration":
        pytest.skip("a configuration is a design")
    with pytest.raises(RankscopeError):
        OTHERS[verb](WRONG[case][0])
    assert not list(tmp_path.iterdir())


def test_item_11_predict_says_what_to_do_with_a_module() -> None:
    with pytest.raises(InputError, match=r"design is a BertModel; .*model\.config\.save_pretrained"):
        rs.predict(MODEL)


INPUTS = {
    "a number": 3,
    "an array": np.zeros((2, 3)),
    "a generator": (text for text in ["a"]),
    "a tokenizer": TOKENIZER,
    "a set": {"a"},
    "an empty list": [],
    "a list of numbers": [1, 2],
    "bytes": b"text",
}


@pytest.mark.parametrize("case", INPUTS)
def test_item_11_what_is_no_input_is_refused_in_words(case: str) -> None:
    with pytest.raises(InputError, match=r"inputs|texts"):
        rs.measure(MODEL, INPUTS[case])
