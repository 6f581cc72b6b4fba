"""Processes that share the folder of a sweep claim its tasks, so that each is done by one of them.

A claim is a lock on one byte of ``FOLDER/claims``, at an offset given by the task's key. The system releases the locks
of a process that ends in whatever way, so a claim never outlives its process and no clock is compared.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.errors import InputError
from rankscope.ext.sweeps.packs import manifests_in
from rankscope.runs.locks import lock_file

if TYPE_CHECKING:
    from rankscope.ext.sweeps.folder import SweepFolder
    from rankscope.ext.sweeps.tasks import Task

CLAIMS = "claims"
_SHARD = re.compile(r"(\d{1,9})/(\d{1,9})")


@dataclass(frozen=True)
class Shard:
    """One of several processes that share a folder.

    The number decides only where a process starts: at its own share of the tasks. Afterwards it takes what the others
    have not claimed.

    Args:
        index: number of this process, from 0.
        count: number of processes.

    Example:
        >>> Shard(1, 3).order(list("abcdefg"))
        ['b', 'e', 'a', 'c', 'd', 'f', 'g']
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise InputError(
                f"shard {self.index}/{self.count}: shards are numbered from 0, so the last of {self.count} is "
                f"{max(self.count - 1, 0)}/{self.count}."
            )

    def order(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks in the order in which this process tries them: its own share first."""
        own = list(tasks[self.index :: self.count])
        return own + [task for place, task in enumerate(tasks) if place % self.count != self.index]


def shard_of(word: str, environment: Mapping[str, str] = os.environ) -> Shard:
    """Read ``"2/8"``, or ``"auto"`` for the place in a Slurm job array or a Kubernetes indexed job.

    Raises:
        InputError: neither, or ``"auto"`` outside of such a job.

    Example:
        >>> shard_of("2/8")
        Shard(index=2, count=8)
        >>> slurm = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "9"}
        >>> shard_of("auto", {**slurm, "SLURM_ARRAY_TASK_STEP": "2"})
        Shard(index=3, count=5)
    """
    if word == "auto":
        return _from_scheduler(environment)
    match = _SHARD.fullmatch(word)
    if not match:
        raise InputError(f"shard={word!r}: expected INDEX/COUNT, such as 0/8, or auto in a job array.")
    return Shard(int(match[1]), int(match[2]))


def _from_scheduler(environment: Mapping[str, str]) -> Shard:
    def number(name: str, default: str | None = None) -> int:
        text = environment.get(name, default)
        if text is None or not text.isdecimal():
            raise InputError(f"shard=auto: the variable {name} is {text!r}, and a number is needed.")
        return int(text)

    if "SLURM_ARRAY_TASK_ID" in environment:
        first, step = number("SLURM_ARRAY_TASK_MIN", "0"), number("SLURM_ARRAY_TASK_STEP", "1") or 1
        last = number("SLURM_ARRAY_TASK_MAX")
        # Not SLURM_ARRAY_TASK_COUNT: of an array such as 0,3,7 it is 3, and the numbers run to 7.
        return Shard((number("SLURM_ARRAY_TASK_ID") - first) // step, (last - first) // step + 1)
    if "JOB_COMPLETION_INDEX" in environment:
        return Shard(number("JOB_COMPLETION_INDEX"), number("JOB_COMPLETIONS"))
    raise InputError(
        "shard=auto needs the variables of a Slurm job array (SLURM_ARRAY_TASK_ID) or of a Kubernetes indexed job "
        "(JOB_COMPLETION_INDEX, and JOB_COMPLETIONS set in its manifest). Elsewhere, give --shard INDEX/COUNT."
    )


class Claims:
    """The claims of one process on the tasks of a folder.

    Args:
        home: folder of the sweep, already created.

    Raises:
        ResultError: the file system has no locks.
    """

    def __init__(self, home: SweepFolder) -> None:
        self._home = home
        # The clock of the file system, which is the one that dates failures.
        with tempfile.NamedTemporaryFile(dir=home.home) as stamp:
            self._started = os.fstat(stamp.fileno()).st_mtime_ns
        self._manifests: frozenset[str] = frozenset()
        self._packed: frozenset[str] = frozenset()

    def waiting(self, tasks: Sequence[Task]) -> Iterator[Task]:
        """Yield each task that is neither done nor claimed by another process; it is claimed until the next one.

        Raises:
            ResultError: the file system has no locks.
        """
        with lock_file(self._home.home / CLAIMS, "--shard (unlike --serial and Ray)") as claims:
            for task in tasks:
                if self._is_settled(task.key) or not claims.take(_offset(task.key)):
                    continue
                try:
                    # Another process may have finished it between the look and the lock.
                    if not self._is_settled(task.key):
                        yield task
                finally:
                    claims.release(_offset(task.key))

    def _is_settled(self, key: str) -> bool:
        """Whether a task is done, or failed since this process started; earlier failures are tried again."""
        if self._home.record_file(key).is_file() or key in self._compacted():
            return True
        try:
            return self._home.failure_file(key).stat().st_mtime_ns > self._started
        except FileNotFoundError:
            return False

    def _compacted(self) -> frozenset[str]:
        """Keys of the tasks in packs, which have no files of their own; read again only after a compaction."""
        now = manifests_in(self._home.home)
        if now != self._manifests:
            self._packed, self._manifests = self._home.read(lambda contents: contents.done), now
        return self._packed


def _offset(key: str) -> int:
    """The byte that stands for a task. Two keys with one offset would only wait for each other."""
    return int(key[:15], 16)
