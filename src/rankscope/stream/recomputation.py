"""Blocks that run again in the backward pass: gradient checkpointing.

Which call of a block is being repeated is told by its input: checkpointing hands the block the tensor it had in the
forward pass, or a detached one with the same storage. Only weak references are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rankscope.models.view import Stack


def in_backward() -> bool:
    """Whether autograd is running at this moment."""
    return torch._C._current_graph_task_id() != -1


class CallMemory:
    """Remembers which call took which tensor, as long as that tensor lives."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str | None, StorageWeakRef], int] = {}
        self._latest: dict[str | None, int] = {}

    def begin_pass(self) -> None:
        """Forget tensors that are gone."""
        self._numbers = {key: number for key, number in self._numbers.items() if not key[1].expired()}  # type: ignore[no-untyped-call]
        self._latest.clear()

    def remember(self, stack: Stack, number: int, entry: Tensor) -> None:
        """This tensor went into this call."""
        self._numbers[stack.name, _storage(entry)] = number

    def remember_output(self, stack: Stack, number: int, out: Tensor) -> None:
        """This tensor came out of a repeated call: where several blocks are repeated together, the next takes it."""
        self.remember(stack, number + 1, out)

    def number(self, stack: Stack, module_name: str, entry: Tensor) -> int:
        """The call that is repeated; where its input is not known any more (offloaded), calls come last first."""
        numbers = [i for i, call in enumerate(stack.calls) if call.module_name == module_name]
        known = self._numbers.get((stack.name, _storage(entry)))
        if known not in numbers:
            latest = self._latest.get(stack.name, len(stack.calls))
            known = ([number for number in numbers if number < latest] or numbers)[-1]
        self._latest[stack.name] = known
        return known


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
