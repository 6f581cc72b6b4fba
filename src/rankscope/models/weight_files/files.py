"""One file of weights: its size, its identity, and a read of any range into existing memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rankscope.errors import InputError, LoadError

_REMOTE = ("hub:", "https://", "http://", "s3://", "gs://")


def is_remote(spec: object) -> bool:
    """Whether a spec says that the model is not on this machine.

    Example:
        >>> is_remote("hub:gpt2"), is_remote("s3://bucket/model"), is_remote("./model")
        (True, True, False)
    """
    return isinstance(spec, str) and spec.startswith(_REMOTE)


class WeightFile(Protocol):
    """A file that can be read by range."""

    @property
    def name(self) -> str:
        """Path or address, for messages."""

    @property
    def size(self) -> int:
        """Number of bytes."""

    @property
    def identity(self) -> str:
        """A text that changes if the content does."""

    @property
    def is_remote(self) -> bool:
        """Whether a read is a request to a server, so that few long reads are better than many short ones."""

    def read(self, offset: int, places: Sequence[memoryview]) -> None:
        """Fill these pieces of memory, one after the other, with consecutive bytes from ``offset``.

        Raises:
            LoadError: the bytes cannot be read, or the file has changed since it was opened.
        """

    def fetch(self, offset: int, count: int) -> None:
        """Advise that these bytes will be read soon; does nothing if there is nobody to advise."""


def bytes_at(file: WeightFile, offset: int, count: int) -> bytes:
    """A range of a file as bytes."""
    content = bytearray(count)
    if count:
        file.read(offset, [memoryview(content)])
    return bytes(content)


class LocalFile:
    """A regular file on disk.

    With a memory map, every touched page would count as resident; reading into existing memory needs no second copy.

    Args:
        path: its path.

    Raises:
        LoadError: it cannot be opened.
    """

    is_remote = False

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            facts = path.stat()
        except OSError as error:
            raise LoadError(f"{path} could not be read: {error.strerror}.") from error
        self.size = facts.st_size
        self.identity = f"{path.name}:{facts.st_size}:{facts.st_mtime_ns}"

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    def read(self, offset: int, places: Sequence[memoryview]) -> None:
        """Fill ``places`` from ``offset``."""
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(offset)
                for place in places:
                    self._fill(file, place)
        except OSError as error:
            raise LoadError(f"{self.path} could not be read: {error.strerror}.") from error

    def _fill(self, file: object, place: memoryview) -> None:
        done = 0
        while done < len(place):
            count = file.readinto(place[done:])  # type: ignore[attr-defined]
            if not count:
                raise LoadError(
                    f"{self.path} ended {len(place) - done} bytes early: it was changed while it was being read."
                )
            done += count

    def fetch(self, offset: int, count: int) -> None:
        """Ask the system to read the bytes into its page cache, without waiting."""
        if hasattr(os, "posix_fadvise") and count:  # a length of 0 would mean all of the file
            with self.path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), offset, count, os.POSIX_FADV_WILLNEED)


class Traffic:
    """Counts what is read from a server, and keeps it within a budget; shared by all files of a model.

    Args:
        budget: the largest number of bytes to receive; None for no limit.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        self._promised = 0
        self._began = time.monotonic()
        self._stopped = False
        self._watch: Callable[[int], object] | None = None
        self.received = 0
        self.requests = 0
        self.retries = 0
        self.shared = 0

    @contextmanager
    def request(self, count: int) -> Iterator[Callable[[int], None]]:
        """One request of ``count`` bytes; call the function it yields with the size of each piece that arrives.

        Raises:
            InputError: the budget would be exceeded.
        """
        left = count
        with self._lock:
            self.requests += 1
            if self.budget is not None and self.received + self._promised + count > self.budget:
                raise InputError(
                    f"byte_budget={self.budget:,}: {self.received + self._promised:,} bytes were read or requested, "
                    f"and the next request takes {count:,} more. Raise the budget, or read less."
                )
            self._promised += count

        def arrived(size: int) -> None:
            nonlocal left
            with self._lock:
                self.received += size
                self._promised -= size
                left -= size
                if self._watch is not None:
                    self._watch(size)
            if self._stopped:
                raise LoadError("Reading was stopped.")

        try:
            yield arrived
        finally:
            with self._lock:
                self._promised -= left

    @property
    def age(self) -> float:
        """Seconds since the model was opened."""
        return time.monotonic() - self._began

    def count_retry(self) -> None:
        """A request failed and is repeated."""
        with self._lock:
            self.retries += 1

    def count_shared(self, count: int) -> None:
        """Bytes that another model has in common were not read again."""
        with self._lock:
            self.shared += count

    @property
    def is_stopped(self) -> bool:
        """Whether reads were cancelled, because their result is not needed any more."""
        return self._stopped

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Inside this context, reads in other threads end as soon as their next bytes arrive."""
        self._stopped = True
        try:
            yield
        finally:
            self._stopped = False

    @contextmanager
    def watched(self, watch: Callable[[int], object]) -> Iterator[None]:
        """Call ``watch`` with the size of each piece that arrives, one call at a time."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    @property
    def described(self) -> dict[str, int]:
        """The counts, for a run's record."""
        counts = {"bytes_read": self.received, "requests": self.requests, "retries": self.retries}
        return {**counts, "bytes_shared": self.shared} if self.shared else counts
