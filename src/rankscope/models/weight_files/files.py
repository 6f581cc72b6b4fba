"""One file of weights: its size, and a read of any range into existing memory."""

from __future__ import annotations

import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rankscope.errors import LoadError

_REMOTE = ("hub:", "https://", "http://", "s3://", "gs://")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def is_remote(spec: object) -> bool:
    """Whether a spec says that the model is not on this machine.

    Example:
        >>> is_remote("hub:gpt2"), is_remote("s3://bucket/model"), is_remote("./model")
        (True, True, False)
    """
    return isinstance(spec, str) and spec.startswith(_REMOTE)


def refuse_web_server(spec: object) -> None:
    """Refuse an address of the web, in a sentence without it: it may hold a password.

    Raises:
        LoadError: it is one.
    """
    if isinstance(spec, str) and spec.startswith(("http://", "https://")):
        raise LoadError("Web servers are not read from. Download the model and pass the folder, or give hub:NAME.")


def is_hub_id(text: str) -> bool:
    """Whether a text can be the id of a model on the hub: NAME or OWNER/NAME."""
    return bool(_HUB_ID.fullmatch(text)) and not text.startswith(".")


def hub_id(spec: str) -> tuple[str, str | None]:
    """Id and revision in ``hub:NAME`` or ``hub:NAME@REVISION``.

    Raises:
        LoadError: it names no model of the hub.
    """
    name, _, revision = spec.removeprefix("hub:").partition("@")
    if not is_hub_id(name):
        raise LoadError(
            f"{spec!r:.200} names no model of the hub. Write hub:NAME, hub:OWNER/NAME or hub:NAME@REVISION."
        )
    return name, revision or None


class WeightFile(ABC):
    """A file that can be read by range.

    Attributes:
        name: path or address, for messages.
        size: number of bytes.
        is_remote: whether a read is a request to a server, so that few long reads are better than many short ones.
    """

    name: str
    size: int
    is_remote: bool = False

    @abstractmethod
    def read(self, offset: int, places: Sequence[memoryview]) -> None:
        """Fill these pieces of memory, one after the other, with consecutive bytes from ``offset``.

        Raises:
            LoadError: the bytes cannot be read, or the file has changed since it was opened.
        """

    def fetch(self, offset: int, count: int) -> None:
        """Advise that these bytes will be read soon; does nothing if there is nobody to advise."""
        return


def bytes_at(file: WeightFile, offset: int, count: int) -> bytes:
    """A range of a file as bytes."""
    content = bytearray(count)
    if count:
        file.read(offset, [memoryview(content)])
    return bytes(content)


class LocalFile(WeightFile):
    """A regular file on disk.

    With a memory map, every touched page would count as resident; reading into existing memory needs no second copy.

    Args:
        path: its path.

    Raises:
        LoadError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        try:
            facts = path.stat()
        except OSError as error:
            raise LoadError(f"{path} could not be read: {error.strerror}.") from error
        self.size = facts.st_size

    def read(self, offset: int, places: Sequence[memoryview]) -> None:
        """Fill ``places`` from ``offset``."""
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(offset)
                for place in places:
                    done = 0
                    while done < len(place):  # an unbuffered read may return less than was asked for
                        count = file.readinto(place[done:])
                        if not count:
                            raise LoadError(
                                f"{self.path} ended {len(place) - done} bytes early: it was changed while it was being "
                                "read."
                            )
                        done += count
        except OSError as error:
            raise LoadError(f"{self.path} could not be read: {error.strerror}.") from error

    def fetch(self, offset: int, count: int) -> None:
        """Ask the system to read the bytes into its page cache, without waiting."""
        if hasattr(os, "posix_fadvise") and count:  # a length of 0 would mean all of the file
            with self.path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), offset, count, os.POSIX_FADV_WILLNEED)


class Traffic:
    """Counts what is requested from a server; shared by all files of a model.

    What the client of the server requests again after a failure is not counted.
    """

    def __init__(self) -> None:
        self.received = 0
        self.requests = 0
        self._lock = threading.Lock()
        self._stopped = False

    def request(self, count: int) -> None:
        """Announce a request of ``count`` bytes.

        Raises:
            LoadError: reading was stopped.
        """
        if self._stopped:
            raise LoadError("Reading was stopped.")
        with self._lock:
            self.requests += 1
            self.received += count

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Inside this context, no further request is made, also not by other threads."""
        self._stopped = True
        try:
            yield
        finally:
            self._stopped = False

    @property
    def described(self) -> dict[str, int]:
        """The counts, for a run's record."""
        return {"bytes_read": self.received, "requests": self.requests}
