"""Slices of a stack of matrices that fit into the cache, so that no float64 copy of the whole stack is made."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

# A piece and its intermediate results, in float64, fill the 2 MB second-level cache of a CPU core.
_CPU_ENTRIES = 1 << 17
# Threads share a piece, and each has its own cache. With several threads, synchronisation costs more than cache misses.
_MOST_CPU_ENTRIES = 1 << 20
# Matrices up to this size are taken whole, at least two at a time: in products of several matrices each is the work of
# one thread, so bits do not depend on the number of threads. Those of a single matrix do.
_PAIRED_ENTRIES = 1 << 18
_DEVICE_ENTRIES = 1 << 24


def groups(stack: int, rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices of the stack: several small matrices at a time, or one large one; none of several small ones is alone."""
    size = _group_size(rows, columns, device)
    starts = list(range(0, stack, size))
    if size > 1 and len(starts) > 1 and stack - starts[-1] == 1:
        starts.pop()
    return (slice(*pair) for pair in pairwise([*starts, stack]))


def strips(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices of the rows of one matrix; a single slice if the matrix is small."""
    size = _strip_size(rows, columns, device)
    return (slice(start, min(rows, start + size)) for start in range(0, rows, size))


def group_room(stack: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """Float64 buffer for one group, reused for all groups because fresh memory for each is slower."""
    return torch.empty(_largest_group(stack, rows, columns, device), rows, columns, dtype=torch.float64, device=device)


def piece_room(stack: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """Float64 buffer for one strip of one group."""
    size = _largest_group(stack, rows, columns, device), min(rows, _strip_size(rows, columns, device)), columns
    return torch.empty(size, dtype=torch.float64, device=device)


def are_paired(rows: int, columns: int, device: torch.device) -> bool:
    """Whether matrices of this size are taken several at a time, whatever the number of threads."""
    return device.type == "cpu" and rows * columns <= _PAIRED_ENTRIES


def are_large(rows: int, columns: int) -> bool:
    """Whether a single one fills the cache of a CPU core."""
    return rows * columns > _CPU_ENTRIES // 4


def _largest_group(stack: int, rows: int, columns: int, device: torch.device) -> int:
    return max((group.stop - group.start for group in groups(stack, rows, columns, device)), default=0)


def _group_size(rows: int, columns: int, device: torch.device) -> int:
    """As many matrices as fill half of the budget; a matrix larger than half of it is still one piece, not two."""
    if are_paired(rows, columns, device):
        return max(2, _CPU_ENTRIES // 2 // max(1, rows * columns))
    return max(1, _budget(device) // 2 // max(1, rows * columns))


def _strip_size(rows: int, columns: int, device: torch.device) -> int:
    return max(1, rows) if are_paired(rows, columns, device) else max(1, _budget(device) // max(1, columns))


def _budget(device: torch.device) -> int:
    if device.type != "cpu":
        return _DEVICE_ENTRIES
    threads = torch.get_num_threads()
    return _CPU_ENTRIES if threads == 1 else min(2 * threads * _CPU_ENTRIES, _MOST_CPU_ENTRIES)
