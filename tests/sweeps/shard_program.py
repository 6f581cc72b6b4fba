"""One process of a sweep that several share: ``python -m tests.sweeps.shard_program PLAN FOLDER SHARD LOG``.

Every task it starts and every task it keeps is a line of LOG, which the processes share.
"""

from __future__ import annotations

import os
import sys

import rankscope as rs
from rankscope.sweeps import running
from rankscope.sweeps.tasks import Task
from rankscope.sweeps.working import Outcome, do


def main(plan: str, folder: str, shard: str, log: str) -> None:
    """Run the share of one process."""
    kept = running._kept

    def note(word: str, key: str) -> None:
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, f"{word} {key} {os.getpid()}\n".encode())
        os.close(handle)

    def noted(task: Task) -> Outcome:
        note("start", task.key)
        return do(task)

    def noted_keeping(home: running.SweepFolder, outcome: Outcome) -> int:
        found = kept(home, outcome)
        note("kept", outcome.task.key)
        return found

    running.do, running._kept = noted, noted_keeping
    rs.sweep(plan, folder, shard=shard)


if __name__ == "__main__":
    main(*sys.argv[1:])
