"""Names of the files of a model, and the safetensors files in a folder; what an index names is not trusted."""

from __future__ import annotations

import re
from pathlib import Path

from rankscope._files import read_regular
from rankscope.errors import LoadError
from rankscope.models.loading.config import LARGEST_CONFIG
from rankscope.runs.plain_json import parse_json

INDEX = "model.safetensors.index.json"
LARGEST_INDEX = 64 * 2**20
LARGEST_FILE = 2**28
"""Of a tokenizer's file."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
)
TOKENIZER_EXTRAS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
_PLAIN_NAME = re.compile(r"[^/\\?#%\0]{1,200}\.safetensors")


def safetensors_in(folder: Path) -> list[Path]:
    """The safetensors files of a folder by name; links, as in the hub's cache, are followed to regular files.

    Raises:
        LoadError: one of them is a pipe, a device, a folder, or a broken link.
    """
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    for path in files:
        if not path.is_file():
            raise LoadError(f"{path} is not a regular file, or a link that leads to none. Fetch the model again.")
    return files


def stored_bytes(folder: Path) -> int:
    """The size of all weights in a folder, as safetensors or as pickles."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))


def indexed_files(folder: Path) -> list[Path] | None:
    """The files that a folder's index names; None without an index.

    Raises:
        LoadError: it is not an index, or names something that is not a file in this folder.
    """
    index = folder / INDEX
    if not index.exists():
        return None
    try:
        content = read_regular(index, LARGEST_INDEX)
    except OSError as error:
        raise LoadError(f"{index} is not an index of safetensors files: {error.strerror}.") from error
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
        raise LoadError(f"{where} is not an index of safetensors files: {error!r}.") from error
    for name in names:
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            raise LoadError(
                f"{where} names {str(name)!r:.200}, which is not a file of its own folder. The index is damaged: "
                "fetch the model again."
            )
    return sorted(names)


def refuse_large(name: str, size: int, where: str) -> None:
    """Raise for a file, other than weights, that is too large for what its name says.

    Raises:
        LoadError: with both sizes.
    """
    largest = {INDEX: LARGEST_INDEX, "config.json": LARGEST_CONFIG}.get(name, LARGEST_FILE)
    if size > largest:
        raise LoadError(f"{where} has {size:,} bytes; at most {largest:,} are read of such a file.")
