"""Reads a graph over tokens from an untrusted file: ``.npy``, ``.npz``, ``.json`` or ``.txt``."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope._files import open_regular
from rankscope._headers import read_npy_header
from rankscope.errors import InputError
from rankscope.masks._edges import EDGE_LIMIT, EdgeRows, Ints, distinct, from_codes

BYTE_LIMIT = 1 << 28
"""Largest file, and largest total unpacked size of a zip file."""


def array_from_npy(content: bytes) -> NDArray[Any]:
    """The array of a ``.npy`` file.

    Raises:
        ValueError: not such a file, an array of objects, or a header that does not match the data.
    """
    stream = io.BytesIO(content)
    shape, fortran, dtype = read_npy_header(stream)
    if dtype.kind not in "biufSU":
        raise ValueError(f"its dtype is {dtype}, and only numbers, booleans and text are read")
    count, rest = 1, len(content) - stream.tell()
    for length in shape:
        count *= int(length)
    if min(shape, default=0) < 0 or count * dtype.itemsize != rest:
        raise ValueError(f"its header promises shape {shape} of {dtype}, and {rest} bytes follow")
    flat = np.frombuffer(content, dtype=dtype, count=count, offset=stream.tell()) if count else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def arrays_from_npz(content: bytes, names: set[str]) -> dict[str, NDArray[Any]]:
    """The named arrays that a ``.npz`` file contains.

    Raises:
        ValueError: not such a file, or its unpacked size exceeds the limit.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = [item for item in archive.infolist() if item.filename.removesuffix(".npy") in names]
            if any(item.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED} for item in entries):
                raise ValueError("it is compressed in a way that numpy does not use")
            unpacked = sum(item.file_size for item in entries)
            if unpacked > BYTE_LIMIT:
                raise ValueError(f"it unpacks to {unpacked:,} bytes, more than {BYTE_LIMIT:,}")
            return {item.filename.removesuffix(".npy"): array_from_npy(archive.read(item)) for item in entries}
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"it is not a whole .npz file ({error})") from error


TOKEN_LIMIT = 1 << 20
TEXT_LIMIT = 1 << 25
"""Largest .json or .txt file; as Python lists, it takes about thirty times as much memory."""
DIGEST_LENGTH = 16
_TEXT = {".json", ".txt"}


def graph_from_matrix(matrix: NDArray[Any]) -> EdgeRows:
    """Rows from a square matrix, nonzero at row i and column j if i sees j.

    Raises:
        ValueError: not a square matrix of finite numbers.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size or matrix.dtype.kind not in "biuf":
        raise ValueError(f"an adjacency matrix is square and of numbers, this one is {matrix.shape} of {matrix.dtype}")
    if matrix.dtype.kind == "f" and not np.isfinite(matrix).all():
        raise ValueError("it holds values that are not finite")
    if np.count_nonzero(matrix) > EDGE_LIMIT:
        raise ValueError(f"it has more than {EDGE_LIMIT:,} entries that are not zero")
    queries, keys = np.nonzero(matrix)
    return graph_from_edges(len(matrix), queries, keys)


def graph_from_edges(tokens: int, queries: NDArray[Any], keys: NDArray[Any]) -> EdgeRows:
    """Rows from pairs in any order, repeated or not.

    Raises:
        ValueError: too many, or a pair outside the tokens.
    """
    if not 1 <= tokens <= TOKEN_LIMIT:
        raise ValueError(f"it has {tokens} tokens, and 1 to {TOKEN_LIMIT:,} are read")
    if queries.shape != keys.shape or queries.ndim != 1 or len(queries) > EDGE_LIMIT:
        raise ValueError(f"its pairs are {queries.shape} and {keys.shape}, at most {EDGE_LIMIT:,} are read")
    for side in (queries, keys):
        if side.dtype.kind not in "iu" or (len(side) and not 0 <= int(side.min()) <= int(side.max()) < tokens):
            raise ValueError(f"its pairs must be whole numbers from 0 to {tokens - 1}")
    return from_codes(distinct(queries.astype(np.int64) * tokens + keys.astype(np.int64)), tokens)


def read_graph(source: str) -> tuple[EdgeRows, str]:
    """Rows of the graph in a file, and the digest of its bytes.

    Raises:
        InputError: the file does not exist, is too large, or does not contain a graph.
    """
    path = Path(source)
    read = _READERS.get(path.suffix.lower())
    if read is None:
        endings = ", ".join(_READERS)
        raise InputError(f"adjacency: {source[:200]!r} is not a file ending in {endings}, nor rows such as '10/11'.")
    content = _bytes_of(path)
    try:
        rows = read(content)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"adjacency: {source!r} does not hold a graph: {why}. {EXPECTED}") from error
    return rows, hashlib.sha256(content).hexdigest()[:DIGEST_LENGTH]


EXPECTED = (
    "Expected a square matrix whose row i, column j is not zero when token i sees token j: numpy.save (.npy), "
    "scipy.sparse.save_npz (.npz), nested lists or {'tokens': n, 'edges': [[i, j], ...]} (.json), "
    "or one line of 0 and 1 per row (.txt)."
)


def _bytes_of(path: Path) -> bytes:
    limit = TEXT_LIMIT if path.suffix.lower() in _TEXT else BYTE_LIMIT
    shown = repr(str(path)[:200])
    try:
        if not path.is_file():
            raise InputError(f"adjacency: there is no file {shown}. Give the path of a graph. {EXPECTED}")
        with open_regular(path) as stream:
            content = stream.read(limit + 1)
    except OSError as error:
        raise InputError(f"adjacency: {shown} cannot be read: {error.strerror}.") from error
    if len(content) > limit:
        raise InputError(f"adjacency: {shown} has more than {limit:,} bytes; save it sparse, as .npz.")
    return content


def _from_npy(content: bytes) -> EdgeRows:
    return graph_from_matrix(array_from_npy(content))


def _from_npz(content: bytes) -> EdgeRows:
    held = arrays_from_npz(content, {"format", "shape", "data", "indices", "indptr", "row", "col"})
    tokens = _tokens_of(held)
    values = held["data"]
    if "row" in held:
        queries, keys = held["row"], held["col"]
    else:
        owners = _owners(held["indptr"], len(held["indices"]), tokens)
        by_column = "format" in held and _text(held["format"]) == "csc"
        queries, keys = (held["indices"], owners) if by_column else (owners, held["indices"])
    if not values.shape == queries.shape == keys.shape or values.dtype.kind not in "biuf":
        raise ValueError(f"it has {values.shape} values of {values.dtype} for {queries.shape} and {keys.shape} indices")
    return graph_from_edges(tokens, queries[values != 0], keys[values != 0])


def _text(value: NDArray[Any]) -> str:
    raw = value.item()
    return raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw)


def _tokens_of(held: Mapping[str, NDArray[Any]]) -> int:
    shape = held["shape"]
    if shape.dtype.kind not in "iu" or shape.shape != (2,) or shape[0] != shape[1] or not 1 <= shape[0] <= TOKEN_LIMIT:
        raise ValueError(f"its shape is {shape.tolist()[:4]}, and a square one of at most {TOKEN_LIMIT:,} is read")
    return int(shape[0])


def _owners(indptr: NDArray[Any], count: int, tokens: int) -> Ints:
    if indptr.dtype.kind not in "iu":
        raise ValueError(f"its indptr is of {indptr.dtype}")
    bounds = indptr.astype(np.int64)
    if bounds.shape != (tokens + 1,) or bounds[0] != 0 or bounds[-1] != count or (np.diff(bounds) < 0).any():
        raise ValueError("its indptr does not cut its indices into rows")
    return np.repeat(np.arange(tokens, dtype=np.int64), np.diff(bounds))


def _from_json(content: bytes) -> EdgeRows:
    held = json.loads(content)
    if isinstance(held, dict):
        tokens, edges = held["tokens"], held["edges"]
        if type(tokens) is not int or not all(type(number) is int for pair in edges for number in pair):
            raise ValueError("tokens and edges must be whole numbers")
        pairs = np.array(edges, dtype=np.int64).reshape(len(edges), 2)
        return graph_from_edges(tokens, pairs[:, 0], pairs[:, 1])
    return graph_from_matrix(np.array(held))


def _from_txt(content: bytes) -> EdgeRows:
    return graph_from_lines(content.decode("ascii").split("\n"))


def graph_from_lines(lines: list[str]) -> EdgeRows:
    """Rows from lines of 0 and 1, with or without spaces between them; empty lines are ignored.

    Raises:
        ValueError: another character, or lines of different lengths.
    """
    kept = [text for line in lines if (text := "".join(line.split()))]
    strange = sorted(set().union(*kept) - {"0", "1"})
    if strange:
        raise ValueError(f"its lines hold {strange[0]!r}, and only 0 and 1 are read")
    if any(len(line) != len(kept) for line in kept):
        raise ValueError(f"it has {len(kept)} lines, and one of them does not have {len(kept)} digits")
    digits = np.frombuffer("".join(kept).encode("ascii"), dtype=np.uint8).reshape(len(kept), len(kept))
    return graph_from_matrix(digits - ord("0"))


_READERS: Mapping[str, Callable[[bytes], EdgeRows]] = {
    ".npy": _from_npy,
    ".npz": _from_npz,
    ".json": _from_json,
    ".txt": _from_txt,
}
