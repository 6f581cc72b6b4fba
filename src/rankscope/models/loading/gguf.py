"""Reads a model from a GGUF file: the checks before and after transformers reads it."""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rankscope._files import open_regular
from rankscope.errors import LoadError, MissingExtraError
from rankscope.models.loading.affording import on_meta, refuse_larger_than_memory
from rankscope.models.loading.config import refuse_remote_kernels
from rankscope.models.loading.foreign import refusing
from rankscope.models.loading.pretrained import Request, refuse_too_large

MOST_KEYS = 2**16
MOST_TENSORS = 2**20
MOST_VALUES = 2**23
"""Maximum number of entries of all arrays together; the largest vocabularies with their merges have about 10^6."""
LONGEST_NAME = 2**16
MOST_AXES = 8
LARGEST_ALIGNMENT = 2**20
VERSIONS = (2, 3)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        metadata: values by key; for an array only its length.
        elements: number of elements of each tensor, by name.
    """

    metadata: dict[str, Any]
    elements: dict[str, int]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check keys and tensors: every length, count and offset must be inside the file.

    Raises:
        LoadError: the message says what is wrong.
    """
    if not path.is_file():
        raise LoadError(f"{path} is not a regular file, or a link that leads to none. Fetch the model again.")
    try:
        with open_regular(path) as stream:
            return _HeaderReader(path, stream, path.stat().st_size).header()
    except OSError as error:
        raise LoadError(f"{path} could not be read: {error.strerror}.") from error


class _HeaderReader:
    def __init__(self, path: Path, stream: BinaryIO, size: int) -> None:
        self.path, self.stream, self.size = path, stream, size
        self.place = self.values = 0

    def header(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise self._wrong("it does not begin with the letters GGUF")
        version, tensors, keys = self._numbers("<IQQ")
        if version not in VERSIONS:
            raise self._wrong(f"version {version}; versions 2 and 3 are read, in little-endian order")
        if keys > MOST_KEYS or tensors > MOST_TENSORS:
            raise self._wrong(f"{keys:,} keys and {tensors:,} tensors")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string(LONGEST_NAME)
            if key in metadata:
                raise self._wrong(f"the key {key!r:.80} comes twice")
            metadata[key] = self._value(self._numbers("<I")[0], key)
        spans = dict(self._tensors(tensors))
        self._check_spans(spans, _alignment(metadata, self))
        return GgufHeader(metadata, {name: elements for name, (elements, _, _) in spans.items()})

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string(self.size)
        if kind != _ARRAY:
            raise self._wrong(f"{key!r:.80} has a value of the unknown type {kind}")
        inner, count = self._numbers("<IQ")
        self.values += count
        if self.values > MOST_VALUES:
            raise self._wrong(f"{key!r:.80} brings its arrays to more than {MOST_VALUES:,} entries")
        if inner in _SCALARS:
            self._skip(count * struct.calcsize(_SCALARS[inner]))
        elif inner == _STRING:
            for _ in range(count):
                self._skip(self._numbers("<Q")[0])
        else:
            raise self._wrong(f"{key!r:.80} is an array of the type {inner}, which is not read")
        return count

    def _tensors(self, count: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
        """Name, and elements, offset and bytes."""
        from gguf.constants import GGML_QUANT_SIZES

        sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
        seen: set[str] = set()
        for _ in range(count):
            name = self._string(LONGEST_NAME)
            if name in seen:
                raise self._wrong(f"the tensor {name!r:.80} comes twice")
            seen.add(name)
            (axes,) = self._numbers("<I")
            if axes > MOST_AXES:
                raise self._wrong(f"the tensor {name!r:.80} has {axes:,} axes")
            shape = self._numbers(f"<{axes}Q")
            kind, offset = self._numbers("<IQ")
            if kind not in sizes:
                raise self._wrong(f"the tensor {name!r:.80} is of the unknown type {kind}")
            elements = 1
            for length in shape:
                elements *= length
            block, nbytes = sizes[kind]
            if shape and shape[0] % block:
                raise self._wrong(f"a row of the tensor {name!r:.80} is no multiple of {block} numbers")
            yield name, (elements, offset, elements // block * nbytes)

    def _check_spans(self, spans: dict[str, tuple[int, int, int]], alignment: int) -> None:
        """Check that tensors are after the header, inside the file, and do not overlap."""
        start = -(-self.place // alignment) * alignment
        end = 0
        for name, (_, offset, nbytes) in sorted(spans.items(), key=lambda item: item[1][1:]):
            if nbytes and offset < end:
                raise self._wrong(f"the tensor {name!r:.80} lies upon another")
            end = max(end, offset + nbytes)
            if start + offset + nbytes > self.size:
                raise self._wrong(f"the tensor {name!r:.80} ends {start + offset + nbytes - self.size:,} bytes past it")

    def _string(self, longest: int) -> str:
        (length,) = self._numbers("<Q")
        if length > longest:
            raise self._wrong(f"a name of {length:,} bytes")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._wrong(f"the text at byte {self.place - length + error.start:,} is not UTF-8") from error

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _take(self, count: int) -> bytes:
        if count > self.size - self.place:
            raise self._wrong(f"{count:,} bytes should follow byte {self.place:,}, and {self.size:,} are all")
        self.place += count
        return self.stream.read(count)

    def _skip(self, count: int) -> None:
        if count > self.size - self.place:
            raise self._wrong(f"{count:,} bytes should follow byte {self.place:,}, and {self.size:,} are all")
        self.place += count
        self.stream.seek(self.place)

    def _wrong(self, why: str) -> LoadError:
        return LoadError(f"{self.path} is not a complete GGUF file: {why}. Fetch it again.")


def _alignment(metadata: dict[str, Any], reader: _HeaderReader) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise reader._wrong(f"an alignment of {alignment!r:.80}, which is no power of two")
    return alignment


def only_gguf(folder: Path) -> str | None:
    """The GGUF file of a folder without safetensors, if there is one."""
    if any(folder.glob("*.safetensors")):
        return None
    names = sorted(path.name for path in folder.glob("*.gguf"))
    if len(names) > 1:
        raise LoadError(f"{folder} holds several GGUF files ({', '.join(names)}). Pass the path of one of them.")
    return names[0] if names else None


def gguf_config(folder: Path, gguf: str, request: Request) -> Any:
    """The configuration in a GGUF file, after checking that its header is valid and its numbers fit into memory."""
    if find_spec("gguf") is None:
        raise MissingExtraError("Reading a GGUF file", "gguf", "gguf")
    import transformers

    header = read_gguf_header(folder / gguf)
    for key, value in header.metadata.items():
        if key.endswith(".block_count") and type(value) is int and value > len(header.elements):
            raise LoadError(f"{folder / gguf} announces {value:,} blocks and holds {len(header.elements):,} tensors.")
    refuse_larger_than_memory(sum(header.elements.values()), torch.float32)
    with refusing(LoadError, f"{folder / gguf} holds no configuration that can be read", "Fetch it again."):
        config = transformers.AutoConfig.from_pretrained(str(folder), gguf_file=gguf, local_files_only=True)
    refuse_remote_kernels(config.to_dict(), gguf)
    refuse_too_large(config, request, torch.float32)
    return config


def refuse_other_shapes(model: Any, path: Path) -> None:
    """Refuse tensors whose shapes differ from the metadata: transformers would load them as they are."""
    with on_meta():
        expected = type(model)(copy.deepcopy(model.config))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, parameter in expected.named_parameters():
        if shapes.get(name) != tuple(parameter.shape):
            raise LoadError(
                f"{path} describes {name} as {tuple(parameter.shape)} and holds {shapes.get(name)}: its metadata and "
                "its tensors do not belong together. Fetch it again."
            )
