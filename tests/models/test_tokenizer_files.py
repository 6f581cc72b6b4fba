"""Tokenizer files from a stranger: dangerous ones are refused, damaged ones are said, and neither ends in a crash."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rankscope.errors import InputError, LoadError
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.models.loading.foreign import is_rust_panic, refusing
from rankscope.models.loading.tokenizer import refuse_dangerous_tokenizer

VOCABULARY = {"[UNK]": 0, "a": 1, "b": 2}
WHOLE: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "[UNK]"},
}  # fmt: skip


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    load("init:tiny-bert").model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return tmp_path


def write(folder: Path, **parts: Any) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({**WHOLE, **parts}))


def test_a_whole_tokenizer_is_used(folder: Path) -> None:
    write(folder)
    prepared = prepare_inputs(load(folder), ["a b a"])
    assert prepared.batches[0].inputs["input_ids"].tolist() == [[1, 2, 1]]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("special_tokens_map.json", {"vocab_file": "/dev/zero"}),
        ("special_tokens_map.json", {"tokenizer_file": "../other/tokenizer.json"}),
        ("special_tokens_map.json", {"gguf_file": "m.gguf", "name_or_path": "owner/name", "local_files_only": False}),
        ("tokenizer_config.json", {"gguf_file": "../m.gguf"}),
        ("tokenizer_config.json", {"init_inputs": ["/dev/zero"]}),
    ],
)
def test_files_that_name_other_files_are_refused(name: str, content: dict[str, Any], folder: Path) -> None:
    write(folder)
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(LoadError, match=next(iter(content))):
        load(folder)


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "special_tokens_map.json"])
def test_a_pipe_is_refused_at_once(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(LoadError, match="not a regular file"):
        refuse_dangerous_tokenizer(tmp_path)


def test_what_only_another_parser_takes_goes_no_further(folder: Path) -> None:
    write(folder)
    (folder / "special_tokens_map.json").write_text('{"x_token": NaN, "vocab_file": "/dev/zero"}')
    loaded = load(folder)
    assert loaded.tokenizer is None
    assert "NaN is not JSON" in loaded.notes[0]


PANICS = {
    "at loading": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "at a merge": {
        "model": {"type": "BPE", "vocab": {"a": 0, "é": 1, "aé": 2}, "merges": ["a é"], "dropout": None,
                  "unk_token": None, "continuing_subword_prefix": "####", "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", PANICS)
def test_a_panic_of_the_parser_is_a_remark(case: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(folder, **PANICS[case])
    loaded = load(folder)
    assert loaded.tokenizer is None
    assert "PanicException" in loaded.notes[0]
    assert prepare_inputs(loaded, ["a b"]).batches


def test_a_panic_on_the_text_is_refused_in_words(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A regular expression that backtracks without end: the parser gives up with a panic."""
    pattern = {"Regex": "(a+)+$"}
    write(folder, pre_tokenizer={"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    with pytest.raises(InputError, match="fails on this text: PanicException"):
        prepare_inputs(load(folder), ["a" * 40 + "b"])


def test_a_word_it_cannot_read_is_refused_in_words(folder: Path) -> None:
    write(folder, model={"type": "WordLevel", "vocab": {"a": 1}, "unk_token": "[NONE]"})
    with pytest.raises(InputError, match=r"fails on this text.*pass token ids"):
        prepare_inputs(load(folder), ["something"])


def test_ids_without_an_embedding_are_refused(folder: Path) -> None:
    write(folder, model={"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 10**6}, "unk_token": "[UNK]"})
    with pytest.raises(InputError, match="the id 1,000,000"):
        prepare_inputs(load(folder), ["a"])


def test_a_tokenizer_that_makes_no_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    write(folder, normalizer=replace({"Regex": r"[\s\S]"}, ""))
    (tmp_path / "text.txt").write_text("a b")
    for given in (["a b"], None, tmp_path / "text.txt"):
        with pytest.raises(InputError, match="no tokens"):
            prepare_inputs(load(folder), given)


def test_only_what_other_parsers_raise_is_taken_over() -> None:
    for passing in (KeyboardInterrupt, SystemExit, MemoryError, LoadError):
        with pytest.raises(passing), refusing(InputError, "It fails", "Do something."):
            raise passing("as it is")
    with (
        pytest.raises(InputError, match=r"It fails: KeyError: 'x'\. Do something\."),
        refusing(InputError, "It fails", "Do something."),
    ):
        raise KeyError("x")
    assert not is_rust_panic(type("PanicException", (BaseException,), {})())
