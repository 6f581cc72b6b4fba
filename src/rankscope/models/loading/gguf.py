"""Reads a model from a GGUF file: the checks before and after transformers reads it."""

from __future__ import annotations

import copy
import math
import struct
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

MOST_VALUES = 2**22
"""Maximum number of entries of all arrays together; the largest vocabularies with their merges have about 10^6."""
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def read_gguf_header(path: Path) -> Any:
    """The keys (``fields``) and tensors of a file, as a ``GGUFReader`` of the package gguf.

    Raises:
        LoadError: the message says what is wrong.
    """
    from gguf import GGUFReader

    with refusing(LoadError, f"{path} is not a complete GGUF file", "Fetch it again."):
        with open_regular(path) as stream:
            _check_keys(stream, path.stat().st_size)
        return GGUFReader(path)


def _check_keys(stream: BinaryIO, size: int) -> None:
    """Walk over the keys: the reader would list every entry of an array, also those after the end of the file."""
    entries = 0

    def number(layout: str) -> int:
        return int(struct.unpack(layout, stream.read(struct.calcsize(layout)))[0])

    def skip(count: int) -> None:
        if stream.tell() + count > size:
            raise ValueError(f"{count:,} bytes should follow byte {stream.tell():,}, and {size:,} are all")
        stream.seek(count, 1)

    def skip_values(kind: int, count: int) -> None:
        if kind == _STRING:
            for _ in range(count):
                skip(number("<Q"))
        elif kind in _SIZES:
            skip(count * _SIZES[kind])
        else:
            raise ValueError(f"a value of the type {kind}, which is not read")

    skip(16)
    for _ in range(number("<Q")):
        skip(number("<Q"))
        kind, count = number("<I"), 1
        if kind == _ARRAY:
            kind, count = number("<I"), number("<Q")
            entries += count
        if entries > MOST_VALUES:
            raise ValueError(f"its arrays have more than {MOST_VALUES:,} entries")
        skip_values(kind, count)


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
    for key, field in header.fields.items():
        blocks = int(field.parts[-1][0]) if key.endswith(".block_count") else 0
        if blocks > len(header.tensors):
            raise LoadError(f"{folder / gguf} announces {blocks:,} blocks and holds {len(header.tensors):,} tensors.")
    elements = sum(math.prod(tensor.shape.tolist()) for tensor in header.tensors)
    refuse_larger_than_memory(elements, torch.float32)
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
