"""A process that tries cases, and one that watches it: a crash, a hang or a trespass is told of with its case.

The one that tries writes each case into memory that both share before it is tried. So the case survives an abort of
a library, which no exception tells of.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS_PER_CASE = 10
"""Of processor time, so that a busy machine finds nothing by itself."""
LONGEST_WAIT = 60
MEMORY = 6 * 2**30
STARTERS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect",
            "socket.getaddrinfo", "pickle.find_class")  # fmt: skip
CHANGERS = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate")
_HEAD = struct.Struct("<QQQQdQ")
_ROOM = 1 << 22


class Trespass(BaseException):
    """Something happened that reading a file must never do."""


class Guard:
    """An audit hook: while a case runs, nothing is written outside its folder and nothing is started."""

    def __init__(self) -> None:
        self.folder: str | None = None
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in STARTERS:
            raise Trespass(f"{event} {arguments!r:.200}")
        if event == "open" and isinstance(arguments[0], str):
            mode, flags = arguments[1], arguments[2] or 0
            writes = any(letter in (mode or "") for letter in "wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes:
                self._must_be_inside(event, arguments[0])
        elif event in CHANGERS:
            self._must_be_inside(event, arguments[0])

    def _must_be_inside(self, event: str, path: Any) -> None:
        place = os.path.realpath(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        place = os.fsdecode(place)
        if place and not place.startswith(str(self.folder)) and place != "/dev/null":
            raise Trespass(f"{event} {path!r:.200} outside of the folder")


@contextmanager
def watched(guard: Guard, folder: Path) -> Iterator[None]:
    """The guard is awake and the clock runs."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_CASE)
    guard.folder = os.path.realpath(folder)
    try:
        yield
    finally:
        guard.folder = None
        signal.setitimer(signal.ITIMER_PROF, 0)


class Board:
    """What both processes see: the case being tried, and how many were read, refused and found."""

    OUTCOMES = ("read", "refused", "found")

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, _ROOM)
        self.counts = [0, 0, 0]
        self.case = 0

    def begin(self, number: int, data: bytes) -> None:
        """Case ``number`` is about to be tried."""
        self.case = number
        self.memory[_HEAD.size : _HEAD.size + len(data)] = data
        self._write(len(data))

    def end(self, outcome: str) -> None:
        """It came to this."""
        self.counts[self.OUTCOMES.index(outcome)] += 1
        self.case += 1
        self._write(0)

    def look(self) -> tuple[int, float, bytes]:
        """The case under way, since when, and its bytes; the counts are taken over."""
        *self.counts, self.case, since, length = _HEAD.unpack_from(self.memory, 0)
        return self.case, since, self.memory[_HEAD.size : _HEAD.size + length]

    def _write(self, length: int) -> None:
        _HEAD.pack_into(self.memory, 0, *self.counts, self.case, time.monotonic(), length)


def in_a_child(board: Board, work: Callable[[], None]) -> str | None:
    """Run ``work`` in a process of its own; None if it came to its end, else how it died."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking beside threads: none of them is needed in the child
        child = os.fork()
    if child == 0:
        os._exit(_protected(work))
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return None if code == 0 else f"the process died ({code})"
        _, since, data = board.look()
        if data and since and time.monotonic() - since > LONGEST_WAIT:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"did not come back in {LONGEST_WAIT} seconds"
        time.sleep(0.25)


def _protected(work: Callable[[], None]) -> int:
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, _too_slow)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        work()
    except BaseException as error:  # noqa: BLE001 - the parent only sees the code
        print(f"the harness itself failed: {error!r}", flush=True)
        return 3
    return 0


def _too_slow(*_: object) -> None:
    raise Trespass(f"more than {SECONDS_PER_CASE} seconds")
