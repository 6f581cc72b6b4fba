"""File locks, which the system releases when a process ends in whatever way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

from rankscope.errors import ResultError


def _module() -> ModuleType | None:
    """The locks of a POSIX system; None on Windows."""
    try:
        import fcntl
    except ImportError:
        return None
    return fcntl


@contextmanager
def taking_turns(folder: Path) -> Iterator[None]:
    """Inside this context no other writer of the folder is in it; each waits for the one before.

    Without locks (Windows, some network file systems) nobody waits.
    """
    fcntl = _module()
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sole_writer(folder: Path) -> Callable[[], None] | None:
    """Claim a folder until the returned function is called or the process ends; None if somebody else has it.

    Another writer in the same process counts as well. Without locks (Windows, some network file systems) everybody gets
    the folder.
    """
    fcntl = _module()
    if fcntl is None:
        return lambda: None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(handle)
            return None
    return partial(_closed_once, [handle])


def _closed_once(handles: list[int]) -> None:
    while handles:
        os.close(handles.pop())


@contextmanager
def lock_file(path: Path, purpose: str) -> Iterator[LockFile]:
    """Open a file whose bytes are locks; at the end all locks on it are released.

    A process opens it once at a time: closing any handle of a file drops all locks that the process has on it.

    Args:
        path: its path; created if necessary.
        purpose: what needs the locks, for messages.

    Raises:
        ResultError: the system has no file locks.
    """
    fcntl = _module()
    if fcntl is None:
        raise ResultError(f"{purpose} needs the file locks of a POSIX system.")
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield LockFile(fcntl, handle, path, purpose)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class LockFile:
    """A file whose bytes are locks, each held by at most one process; nobody waits."""

    module: ModuleType
    handle: int
    path: Path
    purpose: str

    def take(self, byte: int = 0) -> bool:
        """Lock one byte; False if another process has it.

        Raises:
            ResultError: the file system has no locks.
        """
        try:
            self.module.lockf(self.handle, self.module.LOCK_EX | self.module.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise ResultError(
                f"{self.path.parent} is on a file system without locks ({error.strerror}), and {self.purpose} needs "
                "them. Mount it with locks, or use another folder."
            ) from error
        return True

    def release(self, byte: int = 0) -> None:
        """Unlock one byte."""
        self.module.lockf(self.handle, self.module.LOCK_UN, 1, byte)
