"""GGUF files from a stranger: every count, length and offset is held against the file before a library believes it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from rankscope.errors import LoadError
from rankscope.models.loading import load
from rankscope.models.loading.gguf import read_gguf_header
from tests.fuzz.loading_targets import gguf_seeds

pytest.importorskip("gguf")


def text(word: str) -> bytes:
    return struct.pack("<Q", len(word)) + word.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], offset: int = 0, kind: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf(keys: list[bytes], tensors: list[bytes], data: int = 64, counts: tuple[int, int] | None = None) -> bytes:
    """A file of these parts; ``counts`` are the numbers of tensors and keys it claims to have."""
    counts = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


LLAMA = key("general.architecture", 8, text("llama"))
WRONG = {
    "other letters": b"GGML" + bytes(60),
    "empty": b"",
    "other version": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "billion keys": gguf([], [], counts=(0, 10**9)),
    "billion tensors": gguf([], [], counts=(10**9, 0)),
    "key twice": gguf([LLAMA, LLAMA], []),
    "unknown value": gguf([key("a", 13, b"")], []),
    "text past the end": gguf([text("a") + struct.pack("<IQ", 8, 2**40)], []),
    "long array": gguf([key("a", 9, struct.pack("<IQ", 0, 2**40))], []),
    "array past the end": gguf([key("a", 9, struct.pack("<IQ", 0, 2**20))], []),
    "array of arrays": gguf([key("a", 9, struct.pack("<IQ", 9, 1))], []),
    "not UTF-8": gguf([struct.pack("<Q", 1) + b"\xff" + struct.pack("<I", 0) + b"\0"], []),
    "tensor twice": gguf([], [tensor("w", (2,)), tensor("w", (2,), 32)]),
    "many axes": gguf([], [text("w") + struct.pack("<I", 10**6)]),
    "unknown kind": gguf([], [tensor("w", (2,), kind=999)]),
    "past the end": gguf([], [tensor("w", (17,))]),
    "sizes that overflow": gguf([], [tensor("w", (2**32, 2**32))]),
    "half a block": gguf([], [tensor("w", (16,), kind=8)]),
    "odd alignment": gguf([key("general.alignment", 4, struct.pack("<I", 3))], []),
    "huge alignment": gguf([key("general.alignment", 4, struct.pack("<I", 2**31))], [tensor("w", (2,))]),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_in_words(case: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(WRONG[case])
    with pytest.raises(LoadError, match="is not a complete GGUF file: "):
        read_gguf_header(tmp_path / "m.gguf")


def test_the_header_tells_keys_and_sizes(tmp_path: Path) -> None:
    lengths = key("some.lengths", 9, struct.pack("<IQ", 4, 3) + bytes(12))
    (tmp_path / "m.gguf").write_bytes(gguf([LLAMA, lengths], [tensor("v", (2, 4)), tensor("w", (8,), 32)]))
    header = read_gguf_header(tmp_path / "m.gguf")
    assert set(header.fields) >= {"general.architecture", "some.lengths"}
    assert {tensor.name: tensor.n_elements for tensor in header.tensors} == {"v": 8, "w": 8}


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(LoadError, match="not a regular file"):
        read_gguf_header(tmp_path / "m.gguf")


def _with(name: str, value: int) -> bytes:
    """The small model with one number of its metadata changed."""
    data = gguf_seeds()[0]
    place = data.index(text(name)) + len(text(name)) + 4
    return data[:place] + struct.pack("<I", value) + data[place + 4 :]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("llama.block_count", 10**9, "announces 1,000,000,000 blocks"),
        ("llama.embedding_length", 2**20, "GiB"),
        ("llama.feed_forward_length", 2**31 - 2, "GiB"),
        ("llama.feed_forward_length", 32, "do not belong together"),
    ],
)
def test_metadata_that_asks_for_more_than_there_is_is_refused(
    name: str, value: int, words: str, tmp_path: Path
) -> None:
    (tmp_path / "m.gguf").write_bytes(_with(name, value))
    with pytest.raises(LoadError, match=words):
        load(tmp_path / "m.gguf")


def test_a_whole_file_is_loaded_with_its_own_numbers(tmp_path: Path) -> None:
    import numpy as np

    (tmp_path / "m.gguf").write_bytes(gguf_seeds()[0])
    loaded = load(tmp_path / "m.gguf")
    drawn = np.random.default_rng(0).standard_normal((30, 8)).astype(np.float32)
    assert torch.equal(loaded.model.get_input_embeddings().weight, torch.from_numpy(drawn))
    assert not loaded.notes
    assert loaded.tokenizer is not None
