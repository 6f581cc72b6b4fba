"""Processes killed at random moments while they write: what is read afterwards is the old or the new, never a part."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rankscope.monitor import read_record
from rankscope.monitor.outlets import RecordWriter
from rankscope.runs.run import load_run
from tests.monitor.test_recording import reading
from tests.runs.builders import make_run, profile


@dataclass(frozen=True)
class Writer:
    """Something that is killed.

    Attributes:
        name: in words.
        make: prepares a folder.
        write: runs in the child until it is killed, or to its end.
        check: reads the folder and asserts that it is whole.
    """

    name: str
    make: Callable[[Path], object]
    write: Callable[[Path], object]
    check: Callable[[Path], object]


def _saves(home: Path) -> None:
    for number in range(2000):
        make_run(profile({"relative_residual": [0.5] * (number % 40 + 1)}).table()).save(home)


def _whole_run(home: Path) -> None:
    run = load_run(home)  # its rows have the hash and the number that the sidecar names
    assert set(run.table["metric"].to_pylist()) == {"relative_residual"}
    run.save(home)
    load_run(home)


def _records(home: Path) -> None:
    writer = RecordWriter(home, {"model": "Tiny"}, segment_bytes=20_000)
    for step in range(100_000):
        writer.write(reading(step, 0.001 * step))


def _steps_without_a_gap(home: Path) -> None:
    record = read_record(home)
    steps = [one.step for one in record.readings]
    assert steps == list(range(len(steps)))
    assert all(one.scalars["rankscope/x"] == 0.001 * one.step for one in record.readings)
    assert record.torn <= 1
    writer = RecordWriter(home, {"model": "Tiny"})
    writer.write(reading(len(steps)))
    writer.close()
    assert len(read_record(home).readings) == len(steps) + 1


WRITERS = (
    Writer("a save", lambda home: make_run(profile({"relative_residual": [0.5]}).table()).save(home), _saves,
           _whole_run),
    Writer("a gauge record", lambda home: RecordWriter(home, {"model": "Tiny"}), _records, _steps_without_a_gap),
)  # fmt: skip


def kills(writer: Writer, count: int, home: Path, seed: int = 0, longest: float = 0.5) -> Counter[str]:
    """Kill the writer so often, at random moments, and check the folder each time; ``"killed"`` or ``"finished"``."""
    dice, found = random.Random(f"{writer.name} {seed}"), Counter[str]()
    folder = home / "folder"
    for _ in range(count):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        writer.make(folder)
        pid = os.fork()
        if pid == 0:
            try:
                writer.write(folder)
            finally:
                os._exit(0)
        time.sleep(dice.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        writer.check(folder)
        found["killed" if os.WIFSIGNALED(status) else "finished"] += 1
    return found
