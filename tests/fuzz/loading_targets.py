"""Models as a user loads them: GGUF files, and the tokenizer files of a folder whose model is run on text."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rankscope.errors import LoadError
from tests.fuzz.target import Target

ROOM = 2**28
"""Bytes of memory that the machine is taken to have: what asks for more must be refused beforehand."""
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


@contextmanager
def small_machine() -> Iterator[None]:
    """Loading believes in ROOM bytes of memory."""
    from rankscope.models.loading import affording

    with patch.object(affording, "_installed", lambda: ROOM):
        yield


def run_on_text(loaded: Any) -> None:
    """What every verb does with a model: make batches of a text, run them."""
    import torch

    from rankscope.models.inputs import prepare_inputs

    prepared = prepare_inputs(loaded, ["a few words of text, ünd 漢字"], tokens=12)
    with torch.no_grad():
        for batch in prepared.batches:
            loaded.model(**batch.inputs)


@cache
def gguf_seeds() -> tuple[bytes, ...]:
    """Two small models, in numbers of 32 bits and in blocks of eight."""
    return _gguf("llama", quantized=False), _gguf("qwen2", quantized=True)


def _gguf(architecture: str, quantized: bool) -> bytes:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    tokens = ["<unk>", "<s>", "</s>", "▁", *LETTERS]
    width, wide, inner = (32, 16, 32) if quantized else (8, 4, 16)
    with tempfile.TemporaryDirectory() as folder:
        writer = GGUFWriter(Path(folder) / "m.gguf", architecture)
        writer.add_block_count(1)
        writer.add_context_length(32)
        writer.add_embedding_length(width)
        writer.add_feed_forward_length(inner)
        writer.add_head_count(2)
        writer.add_head_count_kv(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(1e4)
        writer.add_tokenizer_model("gpt2" if quantized else "llama")
        writer.add_token_list(tokens)
        if quantized:
            writer.add_token_merges(["a b", "ab c"])
        else:
            writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types([2, 3, 3, *[1] * (len(tokens) - 3)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        shapes = {"attn_norm": (width,), "ffn_norm": (width,), "attn_q": (width, width), "attn_k": (wide, width),
                  "attn_v": (wide, width), "attn_output": (width, width), "ffn_gate": (inner, width),
                  "ffn_up": (inner, width), "ffn_down": (width, inner)}  # fmt: skip
        named = {"token_embd": (len(tokens), width), "output_norm": (width,)}
        named |= {f"blk.0.{name}": shape for name, shape in shapes.items()}
        for name, shape in named.items():
            numbers = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
            if quantized and len(shape) == 2:
                kind = GGMLQuantizationType.Q8_0
                writer.add_tensor(f"{name}.weight", quantize(numbers, kind), raw_dtype=kind)
            else:
                writer.add_tensor(f"{name}.weight", numbers)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (Path(folder) / "m.gguf").read_bytes()


def _gguf_header(data: bytes, folder: Path) -> None:
    from rankscope.models.loading.gguf import read_gguf_header

    (folder / "m.gguf").write_bytes(data)
    header = read_gguf_header(folder / "m.gguf")
    assert len(header.tensors) <= len(data)


def _gguf_model(data: bytes, folder: Path) -> None:
    from rankscope.models.loading import load

    (folder / "m.gguf").write_bytes(data)
    with small_machine():
        run_on_text(load(folder / "m.gguf"))


@cache
def _bare_model() -> Any:
    from rankscope.models.loading import load

    return load("init:tiny-bert")


def tokenizer_reader(name: str, beside: Callable[[], dict[str, bytes]] = dict) -> Callable[[bytes, Path], None]:
    """Reads one file of a tokenizer, the others whole, and runs the model on text with what comes of it."""

    def read(data: bytes, folder: Path) -> None:
        from rankscope.models.loading.quiet import quiet_transformers
        from rankscope.models.loading.tokenizer import tokenizer_in

        for other, content in beside().items():
            (folder / other).write_bytes(content)
        (folder / name).write_bytes(data)
        bare = _bare_model()
        with quiet_transformers():
            found, notes = tokenizer_in(folder, bare.config)
        if found is None:  # the model is measured all the same, with this remark
            raise LoadError(" ".join(notes))
        run_on_text(replace(bare, tokenizer=found, notes=notes))

    return read


_ADDED = [{"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
           "special": True} for i, word in enumerate(("[UNK]", "[CLS]", "[SEP]"))]  # fmt: skip
_VOCABULARY = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, **{letter: 3 + i for i, letter in enumerate(LETTERS[:8])}}
_PIECES = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": _VOCABULARY,
           "max_input_chars_per_word": 100}  # fmt: skip
_PAIRS = {"type": "BPE", "dropout": None, "unk_token": "[UNK]", "continuing_subword_prefix": None, "fuse_unk": False,
          "end_of_word_suffix": None, "byte_fallback": False, "vocab": {**_VOCABULARY, "ab": 11, "abc": 12},
          "merges": ["a b", "ab c"]}  # fmt: skip
_UNIGRAM = {"type": "Unigram", "unk_id": 0, "byte_fallback": False,
            "vocab": [["<unk>", 0.0], ["▁", -1.0], ["a", -2.0], ["▁few", -3.5]]}  # fmt: skip
_AROUND = {"type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
           "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
           "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [1], "tokens": ["[CLS]"]}}}  # fmt: skip


def _whole(model: dict[str, Any], **parts: Any) -> bytes:
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return json.dumps({"version": "1.0", **empty, "added_tokens": _ADDED, **parts, "model": model}).encode()


@cache
def tokenizer_seeds() -> tuple[bytes, ...]:
    """Three kinds of models with the usual parts around them."""
    bert = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True}
    split = {"type": "Split", "pattern": {"Regex": r"\s+|\p{L}+"}, "behavior": "Isolated", "invert": False}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    padding = {"strategy": {"Fixed": 4}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "[UNK]"}  # fmt: skip
    limits = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    return (
        _whole(_PIECES, normalizer=bert, pre_tokenizer={"type": "BertPreTokenizer"}, post_processor=_AROUND),
        _whole(_PAIRS, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, {"type": "Digits",
               "individual_digits": True}]}, truncation=limits, padding=padding),
        _whole(_UNIGRAM, normalizer={"type": "Sequence", "normalizers": [{"type": "NFKC"}, spaces]},
               pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}),
    )  # fmt: skip


def _config_seeds() -> tuple[bytes, ...]:
    special = {"0": {key: value for key, value in _ADDED[0].items() if key != "id"}}
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    slow = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 16, "padding_side": "left",
            "added_tokens_decoder": special, "additional_special_tokens": ["[SEP]"]}  # fmt: skip
    return json.dumps(fast).encode(), json.dumps(slow).encode()


def _whole_files() -> dict[str, bytes]:
    """A tokenizer, and code that must not run."""
    return {"tokenizer.json": tokenizer_seeds()[0], "a.py": b"raise SystemExit('the code of a stranger ran')"}


def _plain_config() -> dict[str, bytes]:
    return {"tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast"}'}


def _bert_config() -> dict[str, bytes]:
    return {"tokenizer_config.json": b'{"tokenizer_class": "BertTokenizer"}'}


def _gpt2_files() -> dict[str, bytes]:
    words = json.dumps({"<|endoftext|>": 0, **{letter: 1 + i for i, letter in enumerate(LETTERS)}, "ab": 27, "abc": 28})
    return {"tokenizer_config.json": b'{"tokenizer_class": "GPT2Tokenizer"}', "vocab.json": words.encode()}


@cache
def _pieces_seeds() -> tuple[bytes, ...]:
    """A sentencepiece model of a few words."""
    import io

    from sentencepiece import SentencePieceTrainer

    made = io.BytesIO()
    text = ["a few words of text", "and a few more of them", "so that pieces are found"] * 4
    SentencePieceTrainer.train(sentence_iterator=iter(text), model_writer=made, vocab_size=40, minloglevel=2,
                               normalization_rule_name="identity",
                               hard_vocab_limit=False)  # fmt: skip
    return (made.getvalue(),)


def _t5_config() -> dict[str, bytes]:
    return {"tokenizer_config.json": b'{"tokenizer_class": "T5Tokenizer", "extra_ids": 0}'}


_JSON = (b"null", b"true", b"-1", b"1e999", b"NaN", b"10000000000", b"4294967295", b'"\\ud800"', b"[]", b"{}", b'""')
_STEPS = (b'"Sequence"', b'"Replace"', b'"Precompiled"', b'"ByteLevel"', b'"Prepend"', b'"Strip"', b'"FixedLength"',
          b'{"type":"Replace","pattern":{"String":"a"},"content":"aa"}',
          b'{"type":"Precompiled","precompiled_charsmap":"AAAA"}',
          b'{"type":"FixedLength","length":0}', b'{"type":"Strip","start":99}', b'{"Regex":"(a+)+$"}',
          b'{"Regex":"(?:a{9999}){9999}"}', b'"Unigram"', b'"BPE"', b'"WordLevel"', b'"byte_fallback":true',
          b'"continuing_subword_prefix":"####"', b'"stride":99')  # fmt: skip
_SETTINGS = (b'"auto_map":{"AutoTokenizer":["a.B","a.B"]}', b'"vocab_file":"/dev/zero"', b'"gguf_file":"../m.gguf"',
             b'"tokenizer_file":"/etc/passwd"', b'"init_inputs":["/dev/zero"]', b'"T5Tokenizer"', b'"GPT2Tokenizer"',
             b'"tokenizer_class"', b'"name_or_path":"a/b"', b'"added_tokens_decoder"', b'"chat_template"',
             b'"MistralCommonBackend"', b'"extra_special_tokens"', b'"PreTrainedTokenizerFast"')  # fmt: skip
_GGUF_WORDS = (b"GGUF", b"\x09\x00\x00\x00", b"\x08\x00\x00\x00", b"llama", b"gemma2", b"qwen35", b"mamba", b"t5",
               b".block_count", b".expert_count", b"tokenizer.ggml.model", b"\xff" * 8, b"\x00\x00\x00\x00\x01",
               b"general.alignment")  # fmt: skip

LOADING_TARGETS = (
    Target("gguf-header", gguf_seeds, _gguf_header, _GGUF_WORDS, 0.8),
    Target("gguf", gguf_seeds, _gguf_model, _GGUF_WORDS, 0.01),
    Target("tokenizer", tokenizer_seeds, tokenizer_reader("tokenizer.json", _plain_config),
           (*_JSON, *_STEPS), 0.1, 0.9),
    Target("tokenizer-config", _config_seeds, tokenizer_reader("tokenizer_config.json", _whole_files),
           (*_JSON, *_SETTINGS), 0.05, 0.9),
    Target("tokenizer-special", lambda: (b'{"cls_token": "[CLS]", "unk_token": {"content": "[UNK]"}}',),
           tokenizer_reader("special_tokens_map.json", _whole_files), (*_JSON, *_SETTINGS), 0.03, 0.9),
    Target("tokenizer-vocab", lambda: (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n##c\n",),
           tokenizer_reader("vocab.txt", _bert_config), (b"\r\n", b"\x00", b"\xff", b"[UNK]\n"), 0.03),
    Target("tokenizer-merges", lambda: (b"#version: 0.2\na b\nab c\n",),
           tokenizer_reader("merges.txt", _gpt2_files), (b"\n", b" ", b"\x00", b"\xff", "é".encode()), 0.03),
    Target("tokenizer-pieces", _pieces_seeds, tokenizer_reader("spiece.model", _t5_config),
           ("▁".encode(), b"\x0a", b"\x12", b"\xff" * 9, b"\x18\x06"), 0.03),
)  # fmt: skip
