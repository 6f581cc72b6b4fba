"""Reads tensors from (sharded) safetensors files directly into existing memory.

With a memory map, every touched page would count as resident; a copy would need the memory twice. The format is a
length, a JSON header and plain bytes, so reading into an existing tensor needs neither.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankscope import _headers
from rankscope.errors import LoadError
from rankscope.models.loading.shard_files import indexed_files, safetensors_in

_CONVERTED_AT_ONCE = 1 << 22
_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """The location of one tensor in a file."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read_into(self, place: Tensor) -> None:
        """Fill ``place``, a contiguous tensor of the same shape, converting the dtype if it differs."""
        with self.path.open("rb", buffering=0) as file:
            if place.dtype == self.dtype:
                _read_at(file, self.offset, place, self.path)
                return
            # Convert in parts: a whole tensor in the dtype of the file would take extra memory.
            flat = place.view(-1)
            scratch = torch.empty(min(_CONVERTED_AT_ONCE, flat.numel()), dtype=self.dtype)
            for start in range(0, flat.numel(), _CONVERTED_AT_ONCE):
                part = flat[start : start + _CONVERTED_AT_ONCE]
                found = scratch[: part.numel()]
                _read_at(file, self.offset + start * self.dtype.itemsize, found, self.path)
                part.copy_(found)

    def fetch(self) -> None:
        """Ask the system to read the bytes into its page cache, without waiting.

        Does nothing on a system without such a call: it only makes the read that follows faster.
        """
        if hasattr(os, "posix_fadvise") and self.nbytes:  # a length of 0 would mean all of the file
            with self.path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), self.offset, self.nbytes, os.POSIX_FADV_WILLNEED)

    def select(self, axis: int, index: int) -> Tensor:
        """The part at ``index`` along ``axis``, without that axis; reads no other bytes."""
        before, after = self.shape[:axis], self.shape[axis + 1 :]
        found = torch.empty((math.prod(before), *after), dtype=self.dtype)
        step = math.prod(after) * self.dtype.itemsize
        with self.path.open("rb", buffering=0) as file:
            for place in range(found.shape[0]):
                _read_at(file, self.offset + (place * self.shape[axis] + index) * step, found[place], self.path)
        return found.reshape(*before, *after)

    def read_rows(self, rows: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The given rows of a matrix, in this order."""
        width = math.prod(self.shape[1:])
        found = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        with self.path.open("rb", buffering=0) as file:
            for place, row in enumerate(rows):
                _read_at(file, self.offset + row * width * self.dtype.itemsize, found[place], self.path)
        return found.to(dtype)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a model folder by name, from its index or from the headers of its files.

    Raises:
        LoadError: there are no safetensors, or a file is not valid.
    """
    files = _files_of(folder)
    found: dict[str, StoredTensor] = {}
    for path in files:
        for name, entry in read_header(path).items():
            if name in found:
                raise LoadError(f"{path} and {found[name].path} both contain {name!r}. Remove the stale files.")
            found[name] = entry
    return found


def _files_of(folder: Path) -> list[Path]:
    paths = indexed_files(folder) or safetensors_in(folder)
    if not paths:
        raise LoadError(
            f"offload needs a local folder with a config.json and *.safetensors; {str(folder)!r} is not one. Download "
            "a hub model with `hf download NAME --local-dir FOLDER`, or save yours with save_pretrained."
        )
    return paths


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; every entry of the header is validated."""
    header = _headers.read_header(path)
    return {
        name: _checked(path, name, entry, header.start, header.size)
        for name, entry in header.entries.items()
        if name != "__metadata__"
    }


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of the header."""
    found = _headers.read_header(path).entries.get("__metadata__", {})
    return found if isinstance(found, dict) else {}


def _checked(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    try:
        shape = tuple(_whole(axis) for axis in entry["shape"])
        begin, end = (_whole(place) for place in entry["data_offsets"])
        word = str(entry["dtype"])
    except (TypeError, KeyError, ValueError) as error:
        raise LoadError(f"{path}: the header entry of {name!r} is not valid: {error!r}.") from error
    if word not in _DTYPES:
        raise LoadError(f"{path}: {name!r} is stored as {word}. offload reads {', '.join(_DTYPES)}.")
    found = StoredTensor(path, start + begin, shape, _DTYPES[word])
    if any(axis < 0 for axis in shape) or not 0 <= begin <= end <= size - start or end - begin != found.nbytes:
        raise LoadError(
            f"{path}: {name!r} of shape {shape} in {word} cannot be the bytes {begin} to {end} of this file. It is "
            "truncated or damaged: download it again."
        )
    return found


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.40} is not a whole number")
    return value


def _read_at(file: Any, offset: int, place: Tensor, path: Path) -> None:
    if place.numel() == 0:
        return
    view = memoryview(place.reshape(-1).view(torch.uint8).numpy().data)
    file.seek(offset)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise LoadError(f"{path} ended {len(view) - done} bytes early: it was changed while it was being read.")
        done += count
