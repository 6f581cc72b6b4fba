"""What the folders on servers have in common: the index, the shards it names, and copies of the small files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rankscope.errors import LoadError
from rankscope.models.loading.config import LARGEST_CONFIG
from rankscope.models.loading.shard_files import INDEX, LARGEST_FILE, LARGEST_INDEX, named_in_index
from rankscope.models.weight_files.files import Traffic, WeightFile, bytes_at

_AT_ONCE = 8


class RemoteFolder:
    """A folder on a server; a subclass says which files it has.

    Args:
        name: as the user wrote it.
        traffic: counts what is read.
    """

    revision: str | None = None
    origin: Literal["hub", "url"] = "url"

    def __init__(self, name: str, traffic: Traffic) -> None:
        self.name, self.traffic = name, traffic

    def file(self, name: str) -> WeightFile | None:
        """The file of that name; None if there is none."""
        raise NotImplementedError

    def listed(self) -> list[str]:
        """The names of the safetensors files to read if there is no index."""
        raise NotImplementedError

    def weight_files(self) -> list[WeightFile]:
        """Those that the index names, or all."""
        index = self.file(INDEX)
        names = self.listed() if index is None else named_in_index(self._small(INDEX, index), index.name)
        with ThreadPoolExecutor(_AT_ONCE) as readers:
            files = list(readers.map(self.file, names))
        for name, file in zip(names, files, strict=True):
            if file is None:
                raise LoadError(f"{self.name} has no file {name!r}, which its index names. Its upload is incomplete.")
        return [file for file in files if file is not None]

    @contextmanager
    def copied(self, names: Sequence[str]) -> Iterator[Path]:
        """Copies in a temporary folder, which is removed afterwards."""
        with tempfile.TemporaryDirectory(prefix="rankscope-") as folder, ThreadPoolExecutor(_AT_ONCE) as readers:
            for name, content in zip(names, readers.map(self._content, names), strict=True):
                if content is not None:
                    (Path(folder) / name).write_bytes(content)
            if "config.json" in names and not (Path(folder) / "config.json").is_file():
                raise LoadError(f"{self.name} has no config.json, so it is not a model.")
            yield Path(folder)

    def _content(self, name: str) -> bytes | None:
        file = self.file(name)
        return None if file is None else self._small(name, file)

    def _small(self, name: str, file: WeightFile) -> bytes:
        """All of a small file."""
        largest = largest_of(name) or LARGEST_FILE
        if file.size > largest:
            raise LoadError(f"{file.name} has {file.size:,} bytes; at most {largest:,} are read of such a file.")
        content = bytes_at(file, 0, file.size)
        self.check(name, content)
        return content

    def check(self, name: str, content: bytes) -> None:
        """Raise if a whole file is not the one that the server has listed, if it lists files with their hashes."""


def largest_of(name: str) -> int | None:
    """The largest size that a file of this name may have; None for weights."""
    if name == INDEX:
        return LARGEST_INDEX
    if name == "config.json":
        return LARGEST_CONFIG
    return None if name.endswith((".safetensors", ".bin")) else LARGEST_FILE
