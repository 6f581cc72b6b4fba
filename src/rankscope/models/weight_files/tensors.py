"""Reads tensors from (sharded) safetensors files directly into existing memory.

The format is a length, a JSON header and plain bytes, so reading into an existing tensor needs neither a memory map nor
a copy, and works the same for a local file and for a range request.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankscope._headers import Header, header_of
from rankscope.errors import LoadError
from rankscope.models.weight_files.files import LocalFile, WeightFile, bytes_at

_CONVERTED_AT_ONCE = 1 << 22
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
WORDS: Mapping[torch.dtype, str] = {dtype: word for word, dtype in _DTYPES.items()}
"""Formats that are read, by their dtype."""
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

    def part(self, number: int) -> StoredTensor:
        """Entry ``number`` along the first axis, which is one range of the file."""
        size = self.nbytes // self.shape[0]
        return StoredTensor(self.file, self.offset + number * size, self.shape[1:], self.word)

    def select(self, axis: int, index: int) -> Tensor:
        """The part at ``index`` along ``axis``, without that axis; reads no other bytes."""
        before, after = self.shape[:axis], self.shape[axis + 1 :]
        selected = torch.empty((math.prod(before), *after), dtype=self.dtype)
        step = math.prod(after) * self.dtype.itemsize
        for place in range(selected.shape[0]):
            offset = self.offset + (place * self.shape[axis] + index) * step
            self.file.read(offset, [_bytes_of(selected[place])])
        return selected.reshape(*before, *after)

    def read_rows(self, rows: Sequence[int], dtype: torch.dtype, readers: Executor | None = None) -> Tensor:
        """The given rows of a matrix, in this order.

        Args:
            rows: their numbers.
            dtype: dtype of the result.
            readers: reads several ranges at a time; None for one after the other.
        """
        ordered = sorted(set(rows))
        rows_read = torch.empty((len(ordered), *self.shape[1:]), dtype=self.dtype)
        width = math.prod(self.shape[1:]) * self.dtype.itemsize
        done = 0
        jobs: list[Callable[[], None]] = []
        for first, last in _close_together(ordered, width, _SMALL_GAP if self.file.is_remote else 0):
            here = ordered[done : bisect_right(ordered, last)]
            jobs.append(self._rows_job(here, first, last, rows_read[done : done + len(here)]))
            done += len(here)
        run_all(jobs, readers)
        places = {row: place for place, row in enumerate(ordered)}
        return rows_read[[places[row] for row in rows]].to(dtype)

    def _rows_job(self, rows: Sequence[int], first: int, last: int, place: Tensor) -> Callable[[], None]:
        def read() -> None:
            between = torch.empty((last - first + 1, *self.shape[1:]), dtype=self.dtype)
            self.file.read(self.offset + first * (between.nbytes // len(between)), [_bytes_of(between)])
            place.copy_(between[[row - first for row in rows]])

        return read


def _close_together(rows: Sequence[int], width: int, gap: int) -> Iterator[tuple[int, int]]:
    """First and last of the rows that are read together, from sorted rows of ``width`` bytes."""
    first = last = rows[0] if rows else 0
    for row in rows[1:]:
        if (row - last - 1) * width > gap or (row - first + 1) * width > _LONGEST_READ:
            yield first, last
            first = row
        last = row
    if rows:
        yield first, last


def planned_reads(wanted: Iterable[tuple[StoredTensor, Tensor]]) -> list[Callable[[], None]]:
    """The reads that fill these tensors, independent of each other, the longest first.

    Tensors that follow each other in a file are read together, and long ones in parts.
    """
    plain: list[tuple[StoredTensor, int, memoryview]] = []
    jobs: list[tuple[int, Callable[[], None]]] = []
    for stored, place in wanted:
        if place.numel() == 0:
            continue
        if place.dtype == stored.dtype:
            plain.append((stored, stored.offset, _bytes_of(place)))
        else:
            jobs += _conversions(stored, place)
    plain.sort(key=lambda piece: (piece[0].file.name, piece[1]))
    for file, offset, places in _joined(plain):
        jobs.append((sum(map(len, places)), lambda file=file, offset=offset, places=places: file.read(offset, places)))  # type: ignore[misc]
    jobs.sort(key=lambda job: -job[0])  # so that several readers finish at about the same time
    return [job for _, job in jobs]


def _joined(
    pieces: Iterable[tuple[StoredTensor, int, memoryview]],
) -> Iterator[tuple[WeightFile, int, list[memoryview]]]:
    """Neighbouring pieces of a file together, none longer than a read may be."""
    file: WeightFile | None = None
    start = end = 0
    places: list[memoryview] = []
    for stored, begin, whole in pieces:
        for shift in range(0, len(whole), _LONGEST_READ):
            view = whole[shift : shift + _LONGEST_READ]
            if stored.file is file and begin + shift == end and end - start + len(view) <= _LONGEST_READ:
                places.append(view)
            else:
                if file is not None:
                    yield file, start, places
                file, start, places = stored.file, begin + shift, [view]
            end = begin + shift + len(view)
    if file is not None:
        yield file, start, places


def _conversions(stored: StoredTensor, place: Tensor) -> Iterator[tuple[int, Callable[[], None]]]:
    """In parts: a whole tensor in the dtype of the file would take extra memory."""
    flat = place.view(-1)
    for start in range(0, flat.numel(), _CONVERTED_AT_ONCE):
        part = flat[start : start + _CONVERTED_AT_ONCE]

        def read(start: int = start, part: Tensor = part) -> None:
            values = torch.empty(part.shape, dtype=stored.dtype)
            stored.file.read(stored.offset + start * stored.dtype.itemsize, [_bytes_of(values)])
            part.copy_(values)

        yield part.numel() * stored.dtype.itemsize, read


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
    for file, entries in zip(files, headers, strict=True):
        for name, entry in entries.items():
            if name in tensors:
                raise LoadError(
                    f"{file.name} and {tensors[name].file.name} both contain {name!r}. Remove the stale files."
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
    _refuse_overlaps(file, tensors)
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


def _refuse_overlaps(file: WeightFile, found: Mapping[str, StoredTensor]) -> None:
    """Refuse bytes that belong to two tensors: no writer makes such files, and they can claim any total size."""
    end, before = 0, ""
    for name, entry in sorted(found.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset < end:
            raise LoadError(f"{file.name}: {name!r} and {before!r} share bytes. It is damaged: download it again.")
        end, before = entry.offset + entry.nbytes, name


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.40} is not a whole number")
    return value


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
