"""Computations on the threads that torch may use.

LAPACK does not split small matrices over threads, so these are divided among workers that have one thread each. Other
operations are shared by the threads, as torch does. The pool has as many
threads as ``torch.get_num_threads()`` says in the calling thread, so ``OMP_NUM_THREADS`` and ``torch.set_num_threads``
are respected, and a call from inside a worker runs in that worker.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
