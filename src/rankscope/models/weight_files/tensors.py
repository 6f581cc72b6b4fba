"""Reads tensors from (sharded) safetensors files directly into existing memory.

The format is a length, a JSON header and plain bytes, so reading into an existing tensor needs neither a memory map nor
a copy, and works the same for a local file and for a range request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankscope._headers import Header, header_of
from rankscope.errors import LoadError
from rankscope.models.weight_files.files import LocalFile, WeightFile, bytes_at

_CONVERTED_AT_ONCE = 1 << 22
"""Numbers: a whole tensor in the dtype of the file would take extra memory."""
_FIRST_BYTES = 1 << 15
"""Read at the start of a file, so that most headers take one request."""
_LONGEST_READ = 1 << 25
"""Reads are at most this long: several run at once, and little is lost if one fails."""
_SMALL_GAP = 1 << 18
"""Rows of a remote table that lie closer together than this are read with one request."""
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
_FURTHER_BITS = {"I16": 16, "I8": 8, "U16": 16, "U32": 32, "U64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8}
_FURTHER_BITS |= {"F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
_BITS: Mapping[str, int] = {**{word: 8 * dtype.itemsize for word, dtype in _DTYPES.items()}, **_FURTHER_BITS}
"""Sizes of all formats that safetensors has; those without a dtype above are described but not read."""


@dataclass(frozen=True)
class StoredTensor:
    """The location of one tensor in a file.

    Attributes:
        file: the file.
        offset: where its bytes begin.
        shape: its shape.
        word: its format, as in the header.
    """

    file: WeightFile
    offset: int
    shape: tuple[int, ...]
    word: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the format.

        Raises:
            LoadError: it is not read here.
        """
        if self.word not in _DTYPES:
            raise LoadError(f"{self.file.name} has a tensor stored as {self.word}. Read are {', '.join(_DTYPES)}.")
        return _DTYPES[self.word]

    @property
    def is_floating_point(self) -> bool:
        """Whether its numbers can be read as floats."""
        return self.word in _DTYPES and self.dtype.is_floating_point

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return -(-math.prod(self.shape) * _BITS[self.word] // 8)

    def read_into(self, place: Tensor) -> None:
        """Fill ``place``, a contiguous tensor of the same shape, converting the dtype if it differs."""
        for read in planned_reads([(self, place)]):
            read()

    def fetch(self) -> None:
        """Advise that the tensor will be read soon."""
        self.file.fetch(self.offset, self.nbytes)

    def read_rows(self, rows: Sequence[int], dtype: torch.dtype, readers: Executor | None = None) -> Tensor:
        """The given rows of a matrix, in this order; of a remote one, rows close together are read with one request.

        Args:
            rows: their numbers.
            dtype: dtype of the result.
            readers: reads several ranges at a time; None for one after the other.
        """
        ordered = sorted(set(rows))
        found = torch.empty((len(ordered), *self.shape[1:]), dtype=self.dtype)
        width = math.prod(self.shape[1:]) * self.dtype.itemsize
        gap = _SMALL_GAP if self.file.is_remote else 0
        jobs: list[Callable[[], None]] = []
        begin = 0
        for end in range(1, len(ordered) + 1):
            is_apart = end == len(ordered) or (ordered[end] - ordered[end - 1] - 1) * width > gap
            if is_apart or (ordered[end] - ordered[begin] + 1) * width > _LONGEST_READ:
                jobs.append(partial(self._read_run, ordered[begin:end], found[begin:end]))
                begin = end
        run_all(jobs, readers)
        places = {row: place for place, row in enumerate(ordered)}
        return found[[places[row] for row in rows]].to(dtype)

    def _read_run(self, rows: Sequence[int], place: Tensor) -> None:
        """Read everything from the first to the last of these rows, and keep the rows."""
        between = torch.empty((rows[-1] - rows[0] + 1, *self.shape[1:]), dtype=self.dtype)
        self.file.read(self.offset + rows[0] * (between.nbytes // len(between)), [_bytes_of(between)])
        place.copy_(between[[row - rows[0] for row in rows]])


def planned_reads(wanted: Iterable[tuple[StoredTensor, Tensor]]) -> list[Callable[[], None]]:
    """The reads that fill these tensors, independent of each other, the longest first; long tensors in parts."""
    jobs: list[tuple[int, Callable[[], None]]] = []
    for stored, place in wanted:
        width = stored.dtype.itemsize
        at_once = max(1, _LONGEST_READ // width) if place.dtype == stored.dtype else _CONVERTED_AT_ONCE
        flat = place.view(-1)
        for start in range(0, flat.numel(), at_once):
            part = flat[start : start + at_once]
            jobs.append((part.numel() * width, partial(_read_part, stored, start * width, part)))
    jobs.sort(key=lambda job: -job[0])  # so that several readers finish at about the same time
    return [job for _, job in jobs]


def _read_part(stored: StoredTensor, offset: int, place: Tensor) -> None:
    """Fill consecutive numbers, converting the dtype if it differs."""
    values = place if place.dtype == stored.dtype else torch.empty(place.shape, dtype=stored.dtype)
    stored.file.read(stored.offset + offset, [_bytes_of(values)])
    if values is not place:
        place.copy_(values)


def run_all(jobs: Sequence[Callable[[], None]], readers: Executor | None) -> None:
    """Run independent reads, several at a time if there is an executor."""
    if readers is None:
        for job in jobs:
            job()
        return
    for done in [readers.submit(job) for job in jobs]:
        done.result()


def stored_in(files: Sequence[WeightFile], readers: Executor | None = None) -> dict[str, StoredTensor]:
    """All tensors of these files by name, from their headers.

    Raises:
        LoadError: a file is not valid, or two contain the same tensor.
    """
    headers = readers.map(read_header, files) if readers is not None else map(read_header, files)
    tensors: dict[str, StoredTensor] = {}
    for entries in headers:
        for name, entry in entries.items():
            if name in tensors:
                raise LoadError(
                    f"{entry.file.name} and {tensors[name].file.name} both contain {name!r}. Remove the stale files."
                )
            tensors[name] = entry
    return tensors


def read_header(file: WeightFile | Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; every entry of the header is validated."""
    file = LocalFile(file) if isinstance(file, Path) else file
    header = _header(file)
    tensors = {
        name: _checked(file, name, entry, header.start)
        for name, entry in header.entries.items()
        if name != "__metadata__"
    }
    # Bytes that belong to two tensors: no writer makes such files, and they can claim any total size.
    end, before = 0, ""
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if stored.offset < end:
            raise LoadError(f"{file.name}: {name!r} and {before!r} share bytes. It is damaged: download it again.")
        end, before = stored.offset + stored.nbytes, name
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of the header."""
    metadata = _header(LocalFile(path)).entries.get("__metadata__", {})
    return metadata if isinstance(metadata, dict) else {}


def _header(file: WeightFile) -> Header:
    first = bytes_at(file, 0, min(file.size, _FIRST_BYTES))

    def read(offset: int, count: int) -> bytes:
        have = first[offset : offset + count]
        return have + bytes_at(file, offset + len(have), count - len(have))

    return header_of(file.name, file.size, read)


def _checked(file: WeightFile, name: str, entry: Any, start: int) -> StoredTensor:
    try:
        shape = tuple(_whole(axis) for axis in entry["shape"])
        begin, end = (_whole(place) for place in entry["data_offsets"])
        word = str(entry["dtype"])
    except (TypeError, KeyError, ValueError) as error:
        raise LoadError(f"{file.name}: the header entry of {name!r} is not valid: {error!r}.") from error
    if word not in _BITS:
        raise LoadError(f"{file.name}: {name!r} is stored as {word!r:.40}, which is not a format of safetensors.")
    stored = StoredTensor(file, start + begin, shape, word)
    if any(axis < 0 for axis in shape) or not 0 <= begin <= end <= file.size - start or end - begin != stored.nbytes:
        raise LoadError(
            f"{file.name}: {name!r} of shape {shape} in {word} cannot be the bytes {begin} to {end} of this file. It "
            "is truncated or damaged: download it again."
        )
    return stored


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.40} is not a whole number")
    return value


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
