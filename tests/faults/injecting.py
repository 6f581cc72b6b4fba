"""Faults, put into a process before it becomes the command line. Each runs in a forked child of ``warm.py``."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any


def signal_in_batch(number: int, which: str) -> None:
    """This process sends itself a signal in the middle of its nth forward pass that is measured."""
    from rankscope.stream.tracer import Tracer

    passes = [0]
    enter = Tracer.begin_pass

    def begin(self: Tracer, *args: Any) -> None:
        enter(self, *args)
        passes[0] += 1
        if passes[0] == number:
            os.kill(os.getpid(), getattr(signal, which))

    Tracer.begin_pass = begin  # type: ignore[method-assign]


def signal_in_task(number: int, which: str) -> None:
    """The same within the nth task of a sweep."""
    from rankscope.ext.sweeps import working

    tasks = [0]
    do = working.do

    def doing(task: Any, models: Any) -> Any:
        tasks[0] += 1
        if tasks[0] == number:
            os.kill(os.getpid(), getattr(signal, which))
        return do(task, models)

    working.do = doing


def save_in_turn(one: str, other: str, place: str, times: int) -> None:
    """Save two runs over each other, again and again."""
    from rankscope.runs.run import load_run

    runs = (load_run(one), load_run(other))
    for _ in range(times):
        for run in runs:
            run.save(place)


def killed_at(moment: int, source: str, place: str) -> None:
    """Save a run; the process kills itself at the nth thing that this asks of the system. Exit code 0: it got through.

    Moments lie before and behind each call: make a file, write (half and all), flush, sync, rename, remove.
    """
    from rankscope.runs import places as storage
    from rankscope.runs.run import load_run

    run = load_run(source)
    seen = [0]

    def reached() -> None:
        seen[0] += 1
        if seen[0] == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            reached()
            found = call(*args, **kwargs)
            reached()
            return found

        return called

    class Halting:
        """A file that is written in two halves."""

        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def write(self, content: bytes) -> None:
            middle = len(content) // 2
            for half in (content[:middle], content[middle:]):
                self._stream.write(half)
                self._stream.flush()
                reached()

        def flush(self) -> None:
            self._stream.flush()

        def fileno(self) -> int:
            return int(self._stream.fileno())

        def __enter__(self) -> Halting:
            return self

        def __exit__(self, *_: object) -> None:
            self._stream.close()

    opened = os.fdopen
    storage.tempfile.mkstemp = around(storage.tempfile.mkstemp)
    storage.os.fdopen = lambda *args: Halting(opened(*args))
    for name in ("fsync", "chmod", "replace"):
        setattr(storage.os, name, around(getattr(os, name)))
    storage.Path.unlink = around(Path.unlink)
    run.save(place)


def small_files(limit: int) -> None:
    """No file may grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def little_memory(megabytes: int) -> None:
    """So much more address space than the process has now, and no more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20,) * 2)


def bound_by_permissions(umask: int = 0o022) -> None:
    """Let permissions bind, also for root: give up the right to override them."""
    os.umask(umask)
    if os.geteuid() != 0:
        return

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    words = (ctypes.c_uint32 * 6)()
    header = Header(0x20080522, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(ctypes.byref(header), words) == 0
    override, search = 1 << 1, 1 << 2
    for place in (0, 1):  # effective and permitted
        words[place] &= ~(override | search)
    assert libc.capset(ctypes.byref(header), words) == 0


def train_on_a_full_disk(record: str) -> None:
    """A few steps of training; the disk is full behind the third."""
    import torch

    from rankscope.monitor import Gauge
    from tests.monitor.trainings import bert, probe, train

    bare = train(bert())
    model = bert()
    gauge = Gauge(model, probe(), schedule=1, record=record)
    step = gauge.step
    (segment,) = Path(record).glob("*.jsonl")

    def stepping(number: int, **kwargs: Any) -> Any:
        if number == 3:
            segment.unlink()
            segment.symlink_to("/dev/full")
        return step(number, **kwargs)

    gauge.step = stepping  # type: ignore[method-assign]
    watched = train(model, gauge)
    gauge.close()
    same = all(torch.equal(bare[name], watched[name]) for name in bare)
    print("same weights" if same and gauge.last is not None and gauge.last.step == 5 else "other weights")


def begin_on_a_full_disk(record: str) -> None:
    """A gauge whose record cannot take its first line."""
    from rankscope.errors import InputError
    from rankscope.monitor import Gauge
    from tests.monitor.trainings import bert, probe

    Path(record).mkdir()
    (Path(record) / "readings-00000.jsonl").symlink_to("/dev/full")
    try:
        Gauge(bert(), probe(), record=record)
    except InputError as error:
        print(error)
