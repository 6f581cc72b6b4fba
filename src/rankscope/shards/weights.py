"""The weights of one block at a time, read ahead of their use into memory that is used again and again."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from rankscope._errors import LoadError
from rankscope.models.view import Stack
from rankscope.shards.skeleton import Skeleton, Slot

_ALIGNED = 64


def slots_of_blocks(skeleton: Skeleton, names: Sequence[str]) -> dict[str, list[Slot]]:
    """The parameters below each block, by the block's name.

    Raises:
        LoadError: the checkpoint has no such tensor.
    """
    found: dict[str, list[Slot]] = {}
    for name in dict.fromkeys(names):
        found[name] = [slot for slot in skeleton.slots.values() if slot.name.startswith(f"{name}.")]
        absent = [slot.name for slot in found[name] if slot.stored is None]
        if absent:
            raise LoadError(
                f"{skeleton.folder} holds no tensor for {', '.join(absent[:4])}. transformers may rename it, or make "
                "it from others, when it loads the model (experts, fused projections); that cannot be streamed."
            )
    return found


class BlockWeights:
    """Puts the weights of one block after the other into a skeleton, and reads the next meanwhile.

    Args:
        skeleton: the model.
        stack: its blocks.
        ahead: read the next block while one computes; takes the room of a second block.
    """

    def __init__(self, skeleton: Skeleton, stack: Stack, *, ahead: bool) -> None:
        self._order = [call.module_name for call in stack.calls]
        self._slots = slots_of_blocks(skeleton, self._order)
        self._empty = {slot.name: slot.parameter.data for slots in self._slots.values() for slot in slots}
        self.largest = max(sum(_room(self._empty[slot.name]) for slot in slots) for slots in self._slots.values())
        self._ahead = ahead
        self._buffers = [_aligned(self.largest) for _ in range(1 + ahead)]
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rankscope-shards")
        self._coming: dict[int, Future[list[Tensor]]] = {}
        self._present: str | None = None
        self._turn = 0
        self.blocks_read = 0

    def __enter__(self) -> BlockWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._reader.shutdown(wait=True)
        self.take_out()

    def place(self, number: int) -> None:
        """The weights of block call ``number`` are there when this returns; those of another block are not."""
        name = self._order[number]
        if name != self._present:
            self.take_out()
            self._start(number)
            tensors = self._coming.pop(number).result()
            for slot, tensor in zip(self._slots[name], tensors, strict=True):
                slot.put(tensor)
            self._present = name
        if self._ahead and number + 1 < len(self._order) and self._order[number + 1] != name:
            self._start(number + 1)

    def take_out(self) -> None:
        """No block is there any more."""
        if self._present is not None:
            for slot in self._slots[self._present]:
                slot.put(self._empty[slot.name])
            self._present = None

    def _start(self, number: int) -> None:
        if number not in self._coming:
            buffer = self._buffers[self._turn % len(self._buffers)]
            self._turn += 1
            self._coming[number] = self._reader.submit(self._read, self._order[number], buffer)

    def _read(self, name: str, buffer: Tensor) -> list[Tensor]:
        """In the reader's thread, which must not look at parameters: the verb may hold them in another format."""
        self.blocks_read += 1
        found, offset = [], 0
        for slot in self._slots[name]:
            empty = self._empty[slot.name]
            place = buffer[offset : offset + empty.nbytes].view(empty.dtype).view(empty.shape)
            assert slot.stored is not None
            slot.stored.read_into(place)
            found.append(place)
            offset += _room(empty)
        return found


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def _aligned(size: int) -> Tensor:
    """Bytes that begin where torch's own allocations do, so that the same kernels run on them."""
    buffer = torch.empty(size + _ALIGNED, dtype=torch.uint8)
    shift = -buffer.data_ptr() % _ALIGNED
    return buffer[shift : shift + size]
