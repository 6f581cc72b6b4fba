"""Slices of a stack of matrices that fit into the cache, so that no float64 copy of the whole stack is made."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# A piece and its intermediate results, in float64, fill the 2 MB second-level cache of a CPU core.
_CPU_ENTRIES = 1 << 17
# Threads share a piece, and each has its own cache. With several threads, synchronisation costs more than cache misses.
_MOST_CPU_ENTRIES = 1 << 20
_DEVICE_ENTRIES = 1 << 24


def groups(stack: int, rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices of the stack: several small matrices at a time, or one large one."""
    return _slices(stack, _group_size(rows, columns, device))


def strips(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices of the rows of one matrix; a single slice if the matrix is small."""
    return _slices(rows, _strip_size(columns, device))


def group_room(stack: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """Float64 buffer for one group, reused for all groups because fresh memory for each is slower."""
    size = min(stack, _group_size(rows, columns, device))
    return torch.empty(size, rows, columns, dtype=torch.float64, device=device)


def piece_room(stack: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """Float64 buffer for one strip of one group."""
    size = min(stack, _group_size(rows, columns, device))
    return torch.empty(size, min(rows, _strip_size(columns, device)), columns, dtype=torch.float64, device=device)


def group_size_of_one_thread(rows: int, columns: int) -> int:
    """Number of matrices that one thread of a CPU takes at a time."""
    return max(1, _CPU_ENTRIES // 2 // max(1, rows * columns))


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(length, start + step))


def _group_size(rows: int, columns: int, device: torch.device) -> int:
    """As many matrices as fill half of the budget; a matrix larger than half of it is still one piece, not two."""
    return max(1, _budget(device) // 2 // max(1, rows * columns))


def _strip_size(columns: int, device: torch.device) -> int:
    return max(1, _budget(device) // max(1, columns))


def _budget(device: torch.device) -> int:
    if device.type != "cpu":
        return _DEVICE_ENTRIES
    threads = torch.get_num_threads()
    return _CPU_ENTRIES if threads == 1 else min(2 * threads * _CPU_ENTRIES, _MOST_CPU_ENTRIES)
