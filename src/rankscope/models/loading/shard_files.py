"""Finds the safetensors files of the model in a folder; their names are not trusted."""

from __future__ import annotations

import re
from pathlib import Path

from rankscope.errors import LoadError
from rankscope.runs.plain_json import parse_json

INDEX = "model.safetensors.index.json"
LARGEST_INDEX = 64 * 2**20
_PLAIN_NAME = re.compile(r"[^/\\?#%\0]{1,200}\.safetensors")


def safetensors_in(folder: Path) -> list[Path]:
    """The safetensors files of a folder by name; links, as in the hub's cache, are followed to regular files.

    Raises:
        LoadError: one of them is a pipe, a device, a folder, or a broken link.
    """
    found = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    for path in found:
        if not path.is_file():
            raise LoadError(f"{path} is not a regular file, or a link that leads to none. Fetch the model again.")
    return found


def indexed_files(folder: Path) -> list[Path] | None:
    """The files that a folder's index names; None without an index.

    Raises:
        LoadError: it is not an index, or names something that is not a file in this folder.
    """
    index = folder / INDEX
    if not index.is_file():
        return None
    try:
        if index.stat().st_size > LARGEST_INDEX:
            raise LoadError(f"{index} has more than {LARGEST_INDEX:,} bytes; that is no index.")
        content = index.read_bytes()
    except OSError as error:
        raise LoadError(f"{index} is no index of safetensors files: {error!r}.") from error
    names = named_in_index(content, str(index))
    present = {entry.name: entry for entry in folder.iterdir() if entry.is_file()}
    for name in names:
        if name not in present:
            raise LoadError(
                f"{index} names {name!r:.200}, which is not a file of {folder}. A shard is missing, or the index "
                "is damaged: fetch the model again."
            )
    return [present[name] for name in names]


def named_in_index(content: bytes, where: str) -> list[str]:
    """The names of the files in an index, sorted; only names without a folder are accepted.

    Args:
        content: the index.
        where: its path or address, for messages.

    Raises:
        LoadError: it is not an index, or names a place elsewhere.
    """
    try:
        names = set(parse_json(content)["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise LoadError(f"{where} is no index of safetensors files: {error!r}.") from error
    for name in names:
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            raise LoadError(
                f"{where} names {str(name)!r:.200}, which is not a file of its own folder. The index is damaged: "
                "fetch the model again."
            )
    return sorted(names)
