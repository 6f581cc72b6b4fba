"""The weights of one block at a time, in buffers that are reused."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import accumulate
from types import TracebackType

import torch
from torch import Tensor

from rankscope.errors import LoadError
from rankscope.ext.offload.meta_model import MetaModel, Slot
from rankscope.models.view import Stack
from rankscope.models.weight_files.tensors import planned_reads, run_all

_ALIGNED = 64
_MOST_READERS = 8


def slots_of_blocks(meta_model: MetaModel, names: Sequence[str]) -> dict[str, list[Slot]]:
    """The parameters below each block, by the block's name.

    Raises:
        LoadError: the checkpoint has no such tensor.
    """
    slots_by_block: dict[str, list[Slot]] = {}
    for name in dict.fromkeys(names):
        slots_by_block[name] = [slot for slot in meta_model.slots.values() if slot.name.startswith(f"{name}.")]
        absent = [slot.name for slot in slots_by_block[name] if not slot.parts]
        if absent:
            raise LoadError(
                f"{meta_model.folder.name} holds no tensor for {', '.join(absent[:4])}. transformers may compute "
                "it when it loads the model (split or transposed experts, fused projections); that cannot be offloaded."
            )
    return slots_by_block


def largest_block(meta_model: MetaModel, names: Sequence[str]) -> int:
    """The memory that the weights of the largest of these blocks take."""
    return max(sum(slot.nbytes for slot in slots) for slots in slots_of_blocks(meta_model, names).values())


class BlockWeights:
    """Loads the weights of one block at a time into a model.

    In a local folder, the system prefetches the next block meanwhile: reading it here would take a core from the
    computation and memory for a second block. From a server, the next block is read into a second buffer.

    Args:
        meta_model: the model.
        stack: its blocks.
        ahead: whether there is memory for a second block; only used if the weights come from a server.
    """

    def __init__(self, meta_model: MetaModel, stack: Stack, *, ahead: bool = False) -> None:
        self._order = [call.module_name for call in stack.calls]
        self._slots = slots_of_blocks(meta_model, self._order)
        self._empty = {slot.name: slot.parameter.data for slots in self._slots.values() for slot in slots}
        self._traffic = meta_model.folder.traffic
        size = max(sum(self._rooms(name)) for name in self._slots)
        self._buffers = [_aligned(size) for _ in range(2 if ahead and self._traffic is not None else 1)]
        threads = min(_MOST_READERS, max(torch.get_num_threads(), meta_model.connections))
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="rankscope-offload")
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="rankscope-ahead")
        self._coming: tuple[str, Future[list[Tensor]]] | None = None
        self._present: str | None = None
        self.blocks_read = 0

    def __enter__(self) -> BlockWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with nullcontext() if self._traffic is None else self._traffic.stopping():
            # After an error or an interrupt nobody waits for what is still being read.
            self._ahead.shutdown(wait=True, cancel_futures=True)
            self._readers.shutdown(wait=True, cancel_futures=True)
        self._coming = None
        self.take_out()

    def place(self, number: int) -> None:
        """Load the weights of block call ``number``, in place of those of another block."""
        name = self._order[number]
        if name != self._present:  # a block that is called several times in a row is read once
            self.take_out()
            for slot, tensor in zip(self._slots[name], self._taken(name), strict=True):
                slot.put(tensor)
            self._present = name
        following = next((other for other in self._order[number + 1 :] if other != name), None)
        if following is None or self._coming is not None:
            return
        if len(self._buffers) == 2:
            # The buffers take turns: the one that was just filled is in use, the other is free.
            self._buffers.reverse()
            self._coming = following, self._ahead.submit(self._read, following)
        elif self._traffic is None and following == self._order[number + 1]:
            self._readers.submit(self._fetch, following)

    def take_out(self) -> None:
        """Unload the current block."""
        if self._present is not None:
            for slot in self._slots[self._present]:
                slot.put(self._empty[slot.name])
            self._present = None

    def _taken(self, name: str) -> list[Tensor]:
        """The tensors of a block: those that were read ahead, or read now."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            assert coming[0] == name
            return coming[1].result()
        return self._read(name)

    def _read(self, name: str) -> list[Tensor]:
        """All tensors of a block, several reads at a time.

        Must not touch parameters: it may run in another thread, and the verb may have converted them.
        """
        self.blocks_read += 1
        offsets = accumulate(self._rooms(name), initial=0)
        places = [self._place(slot, offset) for slot, offset in zip(self._slots[name], offsets, strict=False)]
        reads = [read for slot, place in zip(self._slots[name], places, strict=True) for read in slot.reads(place)]
        run_all(planned_reads(reads), self._readers)
        return places

    def _place(self, slot: Slot, offset: int) -> Tensor:
        empty = self._empty[slot.name]
        return self._buffers[0][offset : offset + empty.nbytes].view(empty.dtype).view(empty.shape)

    def _fetch(self, name: str) -> None:
        """Advice only: a missing file raises when it is read."""
        for slot in self._slots[name]:
            for part in slot.parts:
                part.stored.fetch()

    def _rooms(self, name: str) -> list[int]:
        return [-(-self._empty[slot.name].nbytes // _ALIGNED) * _ALIGNED for slot in self._slots[name]]


def _aligned(size: int) -> Tensor:
    """Bytes aligned like torch's own allocations, so that the same kernels run on them."""
    buffer = torch.empty(size + _ALIGNED, dtype=torch.uint8)
    shift = -buffer.data_ptr() % _ALIGNED
    return buffer[shift : shift + size]
