"""Text is read by a tokenizer or the verdict says that it was not, in every verb that reads text."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

import rankscope as rs
from rankscope.errors import InputError, LoadError
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from tests.runs.builders import write_sealed

WORDS = ["[UNK]", "[PAD]", "the", "river", "runs", "under", "bridge", "and", "a", "boat", "waits", "."]
TEXTS = ["the river runs under the bridge and a boat waits .", "a boat waits under the bridge ."]
HASHED = "words were hashed to token ids"
VERBS: dict[str, dict[str, Any]] = {
    "measure": {},
    "ablate": {"variants": ["pure", "full"]},
    "exact": {},
    "decompose": {},
    "bound": {"theorems": ["contraction_interval"]},
    "remedy": {"remedies": ["residual_scale"], "gradients": False},
}


def tokenizer() -> Any:
    model = tokenizers.models.WordLevel({word: place for place, word in enumerate(WORDS)}, "[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as ``save_pretrained`` of model and tokenizer leaves it."""
    folder = tmp_path_factory.mktemp("whole")
    load("init:tiny-gpt2").model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a Trainer checkpoint leaves it: no tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint-500")
    load("init:tiny-gpt2").model.save_pretrained(folder)
    return folder


def values(run: rs.Run) -> list[float]:
    return list(run.table["value"].to_pylist())


@pytest.mark.parametrize(
    "verb", ["measure", *(pytest.param(verb, marks=pytest.mark.slow) for verb in VERBS if verb != "measure")]
)
def test_item_9_the_tokenizer_can_be_given_and_its_absence_is_in_the_verdict(
    verb: str, whole: Path, bare: Path
) -> None:
    act, options = getattr(rs, verb), VERBS[verb]
    right = act(str(whole), TEXTS, **options)
    assert HASHED not in right.verdict
    for model in (str(bare), load(whole).model):
        wrong = act(model, TEXTS, **options)
        assert HASHED in wrong.verdict
        assert wrong.provenance.inputs_hash != right.provenance.inputs_hash
        mended = act(model, rs.Inputs(TEXTS, tokenizer=str(whole)), **options)
        assert mended.provenance.inputs_hash == right.provenance.inputs_hash
        assert HASHED not in mended.verdict
        if verb != "remedy":  # whose rows hold times
            assert values(mended) == pytest.approx(values(right), nan_ok=True)


def test_item_9_a_tokenizer_in_every_form(whole: Path, bare: Path) -> None:
    expected = [[WORDS.index(word) for word in text.split()] for text in TEXTS]
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), unk_token="[UNK]")
    for form in (str(whole), whole, own, tokenizer()):
        prepared = prepare_inputs(load(bare), TEXTS, tokenizer=form)
        part = prepared[0]
        kept = torch.ones_like(part.inputs["input_ids"], dtype=torch.bool) if part.keep is None else part.keep
        assert [row[mask].tolist() for row, mask in zip(part.inputs["input_ids"], kept, strict=True)] == expected
    assert rs.doctor(str(bare), rs.Inputs(TEXTS, tokenizer=whole)).passed


@pytest.mark.parametrize(
    ("form", "error", "why"),
    [
        (3, InputError, "tokenizer is a int"),
        (lambda text: [1], InputError, "tokenizer is a function"),
        ({"a": 1}, InputError, "tokenizer is a dict"),
        ("no-such/tokenizer", LoadError, "tokenizer='no-such/tokenizer'"),
    ],
)
def test_item_9_what_is_no_tokenizer_is_refused(form: Any, error: type[Exception], why: str, bare: Path) -> None:
    with pytest.raises(error, match=why):
        prepare_inputs(load(bare), TEXTS, tokenizer=form)


def test_a_folder_or_file_without_tokenizer_is_refused(bare: Path) -> None:
    with pytest.raises(LoadError, match="holds no tokenizer"):
        prepare_inputs(load(bare), TEXTS, tokenizer=bare)
    with pytest.raises(LoadError, match="is a file"):
        prepare_inputs(load(bare), TEXTS, tokenizer=bare / "config.json")


def test_item_9_cut_texts_are_in_the_verdict(whole: Path, tmp_path: Path) -> None:
    said = rs.measure(str(whole), rs.Inputs(TEXTS, tokens=9), metrics=["relative_residual"])
    assert said.verdict.endswith("1 of 2 texts was cut at 9 tokens.")
    assert "was cut" not in rs.measure(str(whole), rs.Inputs(TEXTS, tokens=11), metrics=["relative_residual"]).verdict
    file = tmp_path / "river.txt"
    file.write_text(" ".join(TEXTS) * 3)
    said = rs.measure(str(whole), rs.Inputs(file, sequences=2, tokens=8), metrics=["relative_residual"])
    assert "Of river.txt only the first 16 of 54 tokens were read." in said.verdict


def test_item_9_a_text_the_tokenizer_does_not_know_is_in_the_verdict(whole: Path) -> None:
    given = rs.measure(str(whole), ["entirely other words here"], metrics=["relative_residual"])
    assert "does not know 100% of the tokens of this text." in given.verdict
    own = rs.measure(str(whole), rs.Inputs(sequences=2, tokens=8), metrics=["relative_residual"])
    assert "random tokens were used instead" in own.verdict
    assert own.provenance.inputs == "random tokens, seed 0"


def test_what_was_asked_for_is_not_said_twice() -> None:
    """Nothing in the verdict where the user gave nothing, or asked for random tokens; the source is in the head."""
    for asked, source in ((False, "built-in sample text, words hashed to ids"), (True, "random tokens, seed 0")):
        run = rs.measure("init:tiny-bert", rs.Inputs(sequences=2, tokens=8, random_tokens=asked))
        assert HASHED not in run.verdict
        assert f"read: {source}" in str(run).splitlines()[0]


def test_item_9_what_was_read_is_saved_and_old_runs_load(tmp_path: Path) -> None:
    run = rs.measure("init:tiny-bert", TEXTS, metrics=["relative_residual"])
    run.save(tmp_path)
    assert rs.load_run(tmp_path).provenance == run.provenance
    facts = json.loads((tmp_path / "run.json").read_text())
    for name in ("inputs", "inputs_hash"):
        del facts["provenance"][name]
    write_sealed(tmp_path / "run.json", facts)
    assert rs.load_run(tmp_path).provenance.inputs_hash is None


def test_the_hash_is_of_tokens_whatever_the_batches() -> None:
    loaded = load("init:tiny-bert")
    first = prepare_inputs(loaded, sequences=5, tokens=12, batch=2).digest
    assert first == prepare_inputs(loaded, sequences=5, tokens=12, batch=5).digest
    assert first != prepare_inputs(loaded, sequences=5, tokens=11, batch=5).digest
    ids = torch.arange(1, 13).reshape(3, 4)
    assert prepare_inputs(loaded, ids).digest == prepare_inputs(loaded, {"input_ids": ids}).digest
    assert prepare_inputs(loaded, ids).digest != prepare_inputs(loaded, ids.flip(0)).digest


def test_item_9_a_sweep_says_what_each_task_read(whole: Path, bare: Path, tmp_path: Path) -> None:
    pytest.importorskip("pydantic")
    models = [
        "init:tiny-bert",
        {"model": str(whole), "name": "own words"},
        {"model": str(bare), "name": "mended", "inputs": {"texts": TEXTS, "tokenizer": str(whole)}},
    ]
    plan = {"models": models, "verbs": ["measure"], "inputs": {"sequences": 1, "tokens": 8}, "seeds": [0, 1]}
    rs.sweep(plan, tmp_path, serial=True)
    counted = rs.query(
        tmp_path, "SELECT regexp_replace(inputs, ', seed .*', '') AS read, count(*) AS n FROM tasks GROUP BY 1"
    )
    assert {row["read"]: row["n"] for row in counted.to_pylist()} == {
        "built-in sample text, words hashed to ids": 2,
        "random tokens": 2,
        "2 texts given by the caller": 2,
    }
    told = rs.query(tmp_path, "SELECT inputs, verdict FROM tasks WHERE model = 'own words' ORDER BY 1").to_pylist()
    assert [entry["inputs"] for entry in told] == ["random tokens, seed 0", "random tokens, seed 1"]
    assert all("random tokens were used instead" in entry["verdict"] for entry in told)


def test_item_9_the_gauge_says_it_too(bare: Path, whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(bare).model
    with caplog.at_level(logging.WARNING), rs.Gauge(model, TEXTS, schedule=1) as gauge:
        gauge.step(0)
    assert HASHED in caplog.text
    caplog.clear()
    with (
        caplog.at_level(logging.WARNING),
        rs.Gauge(model, rs.Inputs(TEXTS, tokenizer=whole), schedule=1, strict=True) as gauge,
    ):
        assert gauge.step(0) is not None
    assert HASHED not in caplog.text
