"""Reads a graph over tokens from an untrusted file: ``.npy`` or ``.npz``."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rankscope._files import read_regular
from rankscope.errors import InputError
from rankscope.masks._edges import EDGE_LIMIT, EdgeRows, distinct, from_codes

BYTE_LIMIT = 1 << 28
"""Largest file, and largest total unpacked size of a zip file."""
TOKEN_LIMIT = 1 << 20
DIGEST_LENGTH = 16
EXPECTED = (
    "Expected a square matrix whose row i, column j is not zero when token i sees token j: numpy.save (.npy) or "
    "scipy.sparse.save_npz (.npz)."
)


def read_graph(source: str) -> tuple[EdgeRows, str]:
    """Rows of the graph in a file, and the digest of its bytes.

    Raises:
        InputError: the file does not exist, is too large, or does not contain a graph.
    """
    shown = repr(source[:200])
    read = _READERS.get(Path(source).suffix.lower())
    if read is None:
        raise InputError(f"adjacency: {shown} is not a file ending in {', '.join(_READERS)}, nor rows such as '10/11'.")
    try:
        content = read_regular(source, BYTE_LIMIT)
    except FileNotFoundError as error:
        raise InputError(f"adjacency: there is no file {shown}. Give the path of a graph. {EXPECTED}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"adjacency: {shown} cannot be read: {getattr(error, 'strerror', error)}.") from error
    try:
        rows = read(content)
    except Exception as error:  # the readers of these formats may raise anything
        raise InputError(f"adjacency: {shown} does not hold a graph: {error}. {EXPECTED}") from error
    return rows, hashlib.sha256(content).hexdigest()[:DIGEST_LENGTH]


def graph_from_matrix(matrix: Any) -> EdgeRows:
    """Rows from a square matrix, dense or sparse, nonzero at row i and column j if i sees j.

    Raises:
        ValueError: not a square matrix of finite numbers, or too large.
    """
    shape = tuple(matrix.shape)
    if len(shape) != 2 or shape[0] != shape[1] or not 1 <= shape[0] <= TOKEN_LIMIT or matrix.dtype.kind not in "biuf":
        raise ValueError(
            f"an adjacency matrix is square, of numbers and of at most {TOKEN_LIMIT:,} tokens; this one is {shape} of "
            f"{matrix.dtype}"
        )
    if matrix.dtype.kind == "f" and not np.isfinite(matrix if isinstance(matrix, np.ndarray) else matrix.data).all():
        raise ValueError("it holds values that are not finite")
    if (np.count_nonzero(matrix) if isinstance(matrix, np.ndarray) else matrix.nnz) > EDGE_LIMIT:
        raise ValueError(f"it has more than {EDGE_LIMIT:,} entries that are not zero")
    queries, keys = matrix.nonzero()
    return from_codes(distinct(queries.astype(np.int64) * shape[0] + keys.astype(np.int64)), shape[0])


def _from_npy(content: bytes) -> EdgeRows:
    return graph_from_matrix(np.load(io.BytesIO(content), allow_pickle=False))


def _from_npz(content: bytes) -> EdgeRows:
    from scipy.sparse import load_npz

    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > BYTE_LIMIT:
        raise ValueError(f"it unpacks to {unpacked:,} bytes, more than {BYTE_LIMIT:,}")
    matrix = load_npz(io.BytesIO(content))
    if matrix.format not in ("csr", "csc", "coo"):
        raise ValueError(f"its format is {matrix.format}; csr, csc and coo are read")
    if matrix.format != "coo":  # whose indices are checked as it is made
        matrix.check_format(full_check=True)
    return graph_from_matrix(matrix)


_READERS: Mapping[str, Callable[[bytes], EdgeRows]] = {".npy": _from_npy, ".npz": _from_npz}
