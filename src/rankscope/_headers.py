"""Reads the headers of safetensors and npy files without torch and without data; the caller must validate them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope._files import open_regular
from rankscope.errors import LoadError

LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file.

    Attributes:
        entries: the JSON object: tensors by name, and ``__metadata__``.
        start: offset of the tensor data.
        size: size of the whole file.
    """

    entries: dict[str, Any]
    start: int
    size: int


def read_header(path: Path) -> Header:
    """The header of a local file; see :func:`header_of`.

    Raises:
        LoadError: the file does not start that way.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size

            def read(offset: int, count: int) -> bytes:
                file.seek(offset)
                return file.read(count)

            return header_of(str(path), size, read)
    except OSError as error:
        raise LoadError(f"{path} could not be read: {error.strerror}.") from error


def header_of(name: str, size: int, read: Callable[[int, int], bytes]) -> Header:
    """Read eight bytes that give a length, then a JSON object of that length.

    Args:
        name: name of the file, for messages.
        size: its size.
        read: returns that many bytes from an offset.

    Raises:
        LoadError: the file does not start that way, or names a tensor twice.
    """
    length = int.from_bytes(read(0, min(8, size)), "little")
    if not 2 <= length <= min(size - 8, LONGEST_HEADER):
        raise LoadError(f"{name} is not a safetensors file: a header of {length} bytes in a file of {size}.")
    try:
        entries = json.loads(read(8, length), object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{name} could not be read as safetensors: its header is not JSON ({error}).") from error
    if not isinstance(entries, dict):
        raise LoadError(f"{name} is not a safetensors file: its header is a JSON {type(entries).__name__}.")
    return Header(entries, 8 + length, size)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Without this, the last of two entries of the same name would silently replace the first."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found
