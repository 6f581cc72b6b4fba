"""Reads files that are not trusted: regular files only, and never more than a limit."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 22
_MOST_HASHES = 200_000
_HASHES: dict[tuple[int, ...], str] = {}


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a regular file, or a link to one, for reading.

    A pipe would block and a device such as ``/dev/zero`` never ends. The type is taken from the open file: a path could
    be exchanged between a look and the opening.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    handle, _ = _opened(path)
    with os.fdopen(handle, "rb") as stream:
        yield stream


def _opened(path: str | os.PathLike[str]) -> tuple[int, os.stat_result]:
    # O_NONBLOCK lets the open of a pipe without a writer return; it does not affect regular files.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file, and only those are read", os.fspath(path))
    return handle, facts


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than ``limit`` bytes; ``strerror`` says which.
    """
    handle, facts = _opened(path)
    # A query over a sweep reads thousands of small files; without a buffered stream that takes a third of the time.
    try:
        # One byte more than there is or may be: a read allocates what it asks for, not what it gets.
        content = _read(handle, min(facts.st_size, limit) + 1)
    finally:
        os.close(handle)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", os.fspath(path))
    return content


def sha256_of(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a regular file, in hexadecimal digits.

    A file that this process has hashed before, with the same inode, size and times of change, is not read again: the
    second query over a sweep costs what it would without hashes.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    known = _HASHES.get(_identity(os.stat(path)))
    if known is not None:
        return known
    handle, facts = _opened(path)
    digest = hashlib.sha256()
    try:
        while part := _read(handle, min(facts.st_size + 1, _CHUNK)):
            digest.update(part)
    finally:
        os.close(handle)
    if len(_HASHES) >= _MOST_HASHES:
        _HASHES.clear()
    return _HASHES.setdefault(_identity(facts), digest.hexdigest())


def _identity(facts: os.stat_result) -> tuple[int, ...]:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _read(handle: int, count: int) -> bytes:
    """So many bytes, or what there is; one system call may bring less than there is."""
    content = os.read(handle, count)
    while len(content) < count and (more := os.read(handle, count - len(content))):
        content += more
    return content


def cache_folder() -> Path:
    """Where downloaded models and timings are kept: ``$RANKSCOPE_CACHE``, or ``~/.cache/rankscope``."""
    chosen = os.environ.get("RANKSCOPE_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "rankscope"
