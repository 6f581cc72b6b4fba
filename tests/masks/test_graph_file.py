"""Graphs from files, good and hostile."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import InputError
from rankscope.masks import MASKS, parse_mask
from rankscope.masks._graph_file import read_graph

MATRIX = np.array([[1, 0, 1, 0], [1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1]])


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def save(path: Path, kind: str) -> Path:
    writers = {
        "bool.npy": lambda f: np.save(f, MATRIX.astype(bool)),
        "float.npy": lambda f: np.save(f, np.asfortranarray(MATRIX * 0.5)),
        "csr.npz": lambda f: scipy.sparse.save_npz(f, scipy.sparse.csr_array(MATRIX)),
        "csc.npz": lambda f: scipy.sparse.save_npz(f, scipy.sparse.csc_array(MATRIX), compressed=False),
        "coo.npz": lambda f: scipy.sparse.save_npz(f, scipy.sparse.coo_matrix(MATRIX)),
        "zeros.npz": lambda f: scipy.sparse.save_npz(
            f, scipy.sparse.csr_array((MATRIX.ravel(), np.tile(np.arange(4), 4), np.arange(0, 17, 4)), shape=(4, 4))
        ),
    }
    writers[kind](path / kind)
    return path / kind


KINDS = [
    "bool.npy",
    "float.npy",
    "csr.npz",
    "csc.npz",
    "coo.npz",
    "zeros.npz",
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_graph(tmp_path: Path, kind: str) -> None:
    path = save(tmp_path, kind)
    mask = MASKS["adjacency"](str(path))
    assert (mask.dense(4).numpy() == MATRIX.astype(bool)).all()
    assert (mask.sparse(4).toarray() == MATRIX.astype(bool)).all()
    assert parse_mask(str(mask)) == mask
    assert (mask & MASKS["causal"]()).dense(4).numpy().tolist() == np.tril(MATRIX).astype(bool).tolist()


def test_a_file_that_changed_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "graph.npy"
    np.save(path, np.array([[1, 0], [1, 1]]))
    described = str(MASKS["adjacency"](str(path)))
    np.save(path, np.ones((2, 2)))
    with pytest.raises(InputError, match="not the file it was"):
        parse_mask(described).dense(2)
    assert MASKS["adjacency"](str(path)).dense(2).all()


def test_a_described_file_is_not_opened_before_it_is_needed(tmp_path: Path) -> None:
    text = f'adjacency(source={json.dumps(str(tmp_path / "none.npy"))}, digest="0123456789abcdef")'
    mask = parse_mask(text)
    with pytest.raises(InputError, match="there is no file"):
        mask.dense(2)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch evil",)


def hostile() -> dict[str, bytes]:
    header = npy(np.zeros((2, 2)))
    promise = header.replace(b"(2, 2)", b"(9999999, 9999999)".ljust(6))[: len(header)]
    good = {"shape": [4, 4], "data": [1, 1], "indices": [0, 1], "indptr": [0, 1, 2, 2, 2]}

    def npz(**changed: object) -> bytes:
        stream = io.BytesIO()
        np.savez(stream, **{name: np.array(value) for name, value in (good | changed).items() if value is not None})
        return stream.getvalue()

    return {
        "pickle.npy": pickle.dumps(Evil()),
        "object.npy": npy_of_objects(),
        "promise.npy": promise,
        "header.npy": header.replace(b"}", b" "),
        "python2.npy": header.replace(b"(2, 2), }  ", b"(2L, 2L), }"),
        "cut.npy": header[:-3],
        "empty.npy": b"",
        "void.npy": npy(np.zeros((0, 0))),
        "text.npy": npy(np.array([["a", "b"], ["c", "d"]])),
        "nan.npy": npy(np.full((2, 2), np.nan)),
        "flat.npy": npy(np.zeros(4)),
        "oblong.npy": npy(np.zeros((2, 3))),
        "fields.npy": npy(np.zeros((2, 2), dtype=[("a", "f4")])),
        "version3.npy": header.replace(b"NUMPY\x01", b"NUMPY\x03"),
        "cut.npz": npz()[:-40],
        "outside.npz": npz(indices=[0, 4]),
        "negative.npz": npz(indices=[0, -1]),
        "fractions.npz": npz(indices=[0.0, 1.0]),
        "falling.npz": npz(indptr=[0, 2, 1, 2, 2]),
        "short.npz": npz(indptr=[0, 1, 2]),
        "values.npz": npz(data=[1, 1, 1]),
        "missing.npz": npz(indptr=None),
        "pointers.npz": npz(indptr=[0.0, 1.0, 2.0, 2.0, 2.0]),
        "late.npz": npz(indptr=[1, 1, 2, 2, 2]),
        "early.npz": npz(indptr=[0, 1, 1, 1, 1]),
        "uneven.npz": npz(row=[0, 1], col=[0, 1, 2]),
        "void.npz": npz(shape=[0, 0], data=[], indices=[], indptr=[0]),
        "huge.npz": npz(shape=[2**62, 2**62]),
        "oblong.npz": npz(shape=[4, 5]),
    }


def npy_of_objects() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([[Evil(), 1], [1, 1]], dtype=object), allow_pickle=True)
    return stream.getvalue()


HOSTILE = hostile()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(HOSTILE[name])
    with pytest.raises(InputError, match=r"does not hold a graph: .*Expected a square matrix"):
        MASKS["adjacency"](name)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "name", ["none.npy", "folder.npy", "pipe.npy", "graph.pkl", "graph", "", "a\x00.npy", "a" * 5000 + ".npy"]
)
def test_what_is_not_a_graph_file_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.npy").mkdir()
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "graph.pkl").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InputError, match="adjacency: "):
        MASKS["adjacency"](name)


def test_a_file_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.masks._graph_file.BYTE_LIMIT", 100)
    with pytest.raises(InputError, match="more than 100 bytes"):
        MASKS["adjacency"](str(save(tmp_path, "bool.npy")))


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.masks._graph_file.BYTE_LIMIT", 1_000_000)
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("it was unpacked"))
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("shape.npy", npy(np.array([4, 4])))
        file.writestr("indices.npy", bytes(2_000_000))
    assert (tmp_path / "bomb.npz").stat().st_size < 5_000
    with pytest.raises(InputError, match="unpacks to 2,000,"):
        MASKS["adjacency"](str(tmp_path / "bomb.npz"))


@given(st.sampled_from(KINDS), st.data())
def test_a_damaged_file_is_a_graph_or_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    path = save(tmp_path_factory.mktemp("damaged"), kind)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    try:
        rows, _ = read_graph(str(path))
    except InputError:
        return
    tokens = len(rows.indptr) - 1
    assert rows.indptr[-1] == rows.count
    assert ((rows.indices >= 0) & (rows.indices < tokens)).all()
