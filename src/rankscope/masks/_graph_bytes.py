"""Arrays out of bytes that nobody vouches for: no pickles, no allocation that the bytes do not back."""

from __future__ import annotations

import io
import tokenize
import warnings
import zipfile
import zlib
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

BYTE_LIMIT = 1 << 28
"""Largest file, and largest sum of what a zip file unpacks to."""


def array_from_npy(content: bytes) -> NDArray[Any]:
    """The array of a ``.npy`` file.

    Raises:
        ValueError: not such a file, an array of objects, or a header that promises other than what follows.
    """
    stream = io.BytesIO(content)
    shape, fortran, dtype = _header(stream)
    if dtype.kind not in "biufSU":
        raise ValueError(f"its dtype is {dtype}, and only numbers, booleans and text are read")
    count, rest = 1, len(content) - stream.tell()
    for length in shape:
        count *= int(length)
    if min(shape, default=0) < 0 or count * dtype.itemsize != rest:
        raise ValueError(f"its header promises shape {shape} of {dtype}, and {rest} bytes follow")
    flat = np.frombuffer(content, dtype=dtype, count=count, offset=stream.tell()) if count else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def _header(stream: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(stream)
    if version not in {(1, 0), (2, 0)}:
        raise ValueError(f"version {version} of the .npy format is for arrays with named fields")
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a header that numpy has to guess at
            return read_header(stream)
    except (Warning, SyntaxError, tokenize.TokenError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"its header cannot be read ({error})") from error


def arrays_from_npz(content: bytes, names: set[str]) -> dict[str, NDArray[Any]]:
    """Those of the named arrays that a ``.npz`` file holds.

    Raises:
        ValueError: not such a file, or one that unpacks to more than the limit.
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
