"""One process of a sweep that several share, with a log of what each of them does."""

from __future__ import annotations

import os
import random
import time

import pandas  # noqa: F401  (pyarrow imports it with its first array; here, the server of the forks does)
import pyarrow as pa

import rankscope as rs
from rankscope.ext.sweeps import running
from rankscope.ext.sweeps.tasks import Task
from rankscope.ext.sweeps.working import Outcome, do
from tests.ext.sweeps.folders import FACTS, rows


def tiny(task: Task) -> Outcome:
    """Rows that depend on the task alone, in a few milliseconds: many processes meet at the claims, not in a model."""
    time.sleep(random.uniform(0.0, 0.01))
    values = {"relative_residual": [random.Random(f"{task.key}:{layer}").random() for layer in range(3)]}
    return Outcome(task, pa.table(rows(task.expected, values)), dict(FACTS))


def main(plan: str, folder: str, shard: str | None, log: str, *, is_tiny: bool = False) -> None:
    """Run the share of one process, or all tasks if ``shard`` is None.

    Every task it starts and every task it keeps is a line of ``log``, which the processes share.
    """
    kept = running._kept
    work = tiny if is_tiny else do

    def note(word: str, key: str) -> None:
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, f"{word} {key} {os.getpid()}\n".encode())
        os.close(handle)

    def noted(task: Task) -> Outcome:
        note("start", task.key)
        return work(task)

    def noted_keeping(home: running.SweepFolder, outcome: Outcome) -> int:
        found = kept(home, outcome)
        note("kept", outcome.task.key)
        return found

    if is_tiny:
        os.fsync = lambda handle: None  # a killed process loses nothing that it has written; only a machine does
    running.do, running._kept = noted, noted_keeping
    rs.sweep(plan, folder, serial=shard is None, shard=shard)
