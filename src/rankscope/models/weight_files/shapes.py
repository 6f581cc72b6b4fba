"""What a checkpoint contains and what reading it would take, from the headers of its files alone."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.models.weight_files.folders import model_folder, stored_tensors

_NUMBERED = re.compile(r"(.*?\b)(\d+)\.")


@dataclass(frozen=True)
class Shapes:
    """The sizes of a checkpoint.

    Attributes:
        model: the spec.
        revision: the commit, for a model on the hub.
        files: number of safetensors files.
        tensors: number of tensors.
        parameters: number of stored numbers.
        formats: numbers per format.
        nbytes: size of all tensors.
        blocks: number of blocks, counted by the numbers in the names of the tensors.
        largest_block: size of the largest block; an offloaded run keeps one in memory, or two from a server.
        bytes_read: what was read from a server to find this out; None for a local folder.
    """

    model: str
    revision: str | None
    files: int
    tensors: int
    parameters: int
    formats: dict[str, int]
    nbytes: int
    blocks: int
    largest_block: int
    bytes_read: int | None

    @property
    def passed(self) -> bool:
        """True: there is nothing to fail."""
        return True

    @property
    def brief(self) -> str:
        """Nothing, if only failures are printed."""
        return ""

    def to_json(self) -> dict[str, Any]:
        """All fields in plain JSON types."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        formats = ", ".join(f"{word} {count:,}" for word, count in sorted(self.formats.items()))
        lines = [
            f"{self.model}" + (f" at commit {self.revision}" if self.revision else ""),
            f"  {self.parameters:,} parameters ({formats}) in {self.tensors:,} tensors, {self.files} files",
            f"  {_size(self.nbytes)} in all; {self.blocks} blocks, the largest {_size(self.largest_block)}",
            f"  measure --offload reads up to {_size(self.nbytes)}, and holds one block, or two from a server",
        ]
        if self.bytes_read is not None:
            lines.append(f"  {_size(self.bytes_read)} were read to find this out")
        return "\n".join(lines)


def shapes_of(spec: str | Path) -> Shapes:
    """The sizes of a checkpoint in a folder, on the hub or on a server.

    Args:
        spec: a local folder, ``hub:NAME`` or an address.

    Raises:
        LoadError: there is no such checkpoint, or it has no safetensors.
    """
    folder = model_folder(spec)
    tensors = stored_tensors(folder)
    blocks: Counter[tuple[str, str]] = Counter()
    formats: Counter[str] = Counter()
    for name, entry in tensors.items():
        formats[entry.word] += math.prod(entry.shape)
        match = _NUMBERED.match(name)
        if match is not None:
            blocks[match[1], match[2]] += entry.nbytes
    return Shapes(
        model=str(spec),
        revision=folder.revision,
        files=len({entry.file.name for entry in tensors.values()}),
        tensors=len(tensors),
        parameters=sum(formats.values()),
        formats=dict(formats),
        nbytes=sum(entry.nbytes for entry in tensors.values()),
        blocks=len(blocks),
        largest_block=max(blocks.values(), default=0),
        bytes_read=None if folder.traffic is None else folder.traffic.received,
    )


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
