"""File locks, which the system releases when a process ends in whatever way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType


def _module() -> ModuleType | None:
    """The locks of a POSIX system; None on Windows."""
    try:
        import fcntl
    except ImportError:
        return None
    return fcntl


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
