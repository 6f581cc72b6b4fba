"""Computations on the threads that torch may use.

LAPACK does not split small matrices over threads, so these are divided among workers that have one thread each. Other
operations are shared by the threads, as torch does, unless the cores are needed by somebody else. The pool has as many
threads as ``torch.get_num_threads()`` says in the calling thread, so ``OMP_NUM_THREADS`` and ``torch.set_num_threads``
are respected, and a call from inside a worker runs in that worker.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_creating = threading.Lock()


def available_threads() -> int:
    """Threads that a computation called from here may use."""
    return torch.get_num_threads()


def over_threads(function: Callable[[T], R], parts: Sequence[T]) -> list[R]:
    """``function`` of every part, in order, each with one thread; an exception of theirs is raised here.

    Grad mode, autocast and torch function modes belong to a thread: in the workers gradients are off, and so are the
    others.

    Example:
        >>> over_threads(lambda x: float(x.sum()), [torch.ones(2), torch.ones(3)])
        [2.0, 3.0]
    """
    threads = available_threads()
    if threads == 1:
        return [function(part) for part in parts]
    return list(_pool(threads).map(partial(_without_gradients, function), parts))


@dataclass
class _ThreadPace:
    """Seconds that a computation took last with all threads and with one, and seconds spent since both were tried."""

    shared: float = math.nan
    alone: float = math.nan
    spent: float = 0.0

    def wants_alone(self) -> bool:
        """The faster way, or the other one if its time is unknown, or so long ago that trying it costs 5% at most."""
        if math.isnan(self.shared) or math.isnan(self.alone):
            return not math.isnan(self.shared)
        return (self.alone < self.shared) != (self.spent > 20.0 * max(self.alone, self.shared))

    def took(self, seconds: float, *, alone: bool) -> None:
        """Take note of a call."""
        other = self.shared if alone else self.alone
        self.spent = 0.0 if seconds > other else self.spent + seconds
        if alone:
            self.alone = seconds
        else:
            self.shared = seconds


_MOST_PACES = 1000
_paces: dict[tuple[int, Hashable], _ThreadPace] = {}


def paced(key: Hashable, function: Callable[[], R]) -> R:
    """``function()`` with all threads, or in a worker with one: whichever took less time for this key.

    Threads that share short operations wait for each other after each of them. If other processes use the cores, every
    wait may last as long as the scheduler lets those run: many times as long as the work itself on one thread.
    """
    threads = available_threads()
    if threads == 1:
        return function()
    if len(_paces) >= _MOST_PACES:
        _paces.clear()
    pace = _paces.setdefault((threads, key), _ThreadPace())
    alone = pace.wants_alone()
    start = time.perf_counter()
    result = over_threads(lambda _: function(), (None,))[0] if alone else function()
    pace.took(time.perf_counter() - start, alone=alone)
    return result


def _without_gradients(function: Callable[[T], R], part: T) -> R:
    with torch.no_grad():
        return function(part)


def _pool(threads: int) -> ThreadPoolExecutor:
    # By process, because the threads of a pool do not survive a fork.
    key = os.getpid(), threads
    with _creating:
        if key not in _pools:
            started = threading.Barrier(threads + 1)
            pool = ThreadPoolExecutor(threads, "rankscope", initializer=_use_one_thread)
            for _ in range(threads):
                pool.submit(started.wait)
            started.wait()
            # The workers have set the number that threads created from now on would start with.
            torch.set_num_threads(threads)
            _pools[key] = pool
        return _pools[key]


def _use_one_thread() -> None:
    torch.get_num_threads()  # the first call in a thread takes over the global number, so it has to come first
    torch.set_num_threads(1)
