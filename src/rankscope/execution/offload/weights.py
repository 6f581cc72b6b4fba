"""The weights of one block at a time, in one buffer that is reused."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from types import TracebackType

import torch
from torch import Tensor

from rankscope.errors import LoadError
from rankscope.execution.offload.meta_model import MetaModel, Slot
from rankscope.models.view import Stack

_ALIGNED = 64
_MOST_READERS = 8


def slots_of_blocks(meta_model: MetaModel, names: Sequence[str]) -> dict[str, list[Slot]]:
    """The parameters below each block, by the block's name.

    Raises:
        LoadError: the checkpoint has no such tensor.
    """
    found: dict[str, list[Slot]] = {}
    for name in dict.fromkeys(names):
        found[name] = [slot for slot in meta_model.slots.values() if slot.name.startswith(f"{name}.")]
        absent = [slot.name for slot in found[name] if slot.stored is None]
        if absent:
            raise LoadError(
                f"{meta_model.folder} holds no tensor for {', '.join(absent[:4])}. transformers may rename it, or "
                "build it from others, when it loads the model (experts, fused projections); that cannot be offloaded."
            )
    return found


class BlockWeights:
    """Loads the weights of one block at a time into a model, while the system prefetches the next.

    Reading the next block here, while this one computes, would take a core from the computation and memory for a
    second block. The read-ahead of the system needs neither.

    Args:
        meta_model: the model.
        stack: its blocks.
    """

    def __init__(self, meta_model: MetaModel, stack: Stack) -> None:
        self._order = [call.module_name for call in stack.calls]
        found = slots_of_blocks(meta_model, self._order)
        # The largest first, so that the reader threads finish at about the same time.
        self._slots = {name: sorted(slots, key=lambda slot: -slot.nbytes) for name, slots in found.items()}
        self._empty = {slot.name: slot.parameter.data for slots in self._slots.values() for slot in slots}
        self._buffer = _aligned(max(sum(self._rooms(name)) for name in self._slots))
        threads = min(_MOST_READERS, torch.get_num_threads())
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="rankscope-offload")
        self._present: str | None = None
        self.blocks_read = 0

    def __enter__(self) -> BlockWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._readers.shutdown(wait=True)
        self.take_out()

    def place(self, number: int) -> None:
        """Load the weights of block call ``number``, in place of those of another block."""
        name = self._order[number]
        if name != self._present:  # a block that is called several times in a row is read once
            self.take_out()
            for slot, tensor in zip(self._slots[name], self._read(name), strict=True):
                slot.put(tensor)
            self._present = name
        following = self._order[number + 1 : number + 2]
        if following and following[0] != name:
            self._readers.submit(self._fetch, following[0])

    def take_out(self) -> None:
        """Unload the current block."""
        if self._present is not None:
            for slot in self._slots[self._present]:
                slot.put(self._empty[slot.name])
            self._present = None

    def _read(self, name: str) -> list[Tensor]:
        """All tensors of a block, several at a time."""
        self.blocks_read += 1
        offsets = [0, *accumulate(self._rooms(name))]
        return list(self._readers.map(self._read_one, self._slots[name], offsets))

    def _read_one(self, slot: Slot, offset: int) -> Tensor:
        """Runs in a reader thread, which must not touch parameters: the verb may have converted them."""
        empty = self._empty[slot.name]
        place = self._buffer[offset : offset + empty.nbytes].view(empty.dtype).view(empty.shape)
        assert slot.stored is not None
        slot.stored.read_into(place)
        return place

    def _fetch(self, name: str) -> None:
        """Advice only: a missing file raises when it is read."""
        for slot in self._slots[name]:
            assert slot.stored is not None
            slot.stored.fetch()

    def _rooms(self, name: str) -> list[int]:
        return [-(-self._empty[slot.name].nbytes // _ALIGNED) * _ALIGNED for slot in self._slots[name]]


def _aligned(size: int) -> Tensor:
    """Bytes aligned like torch's own allocations, so that the same kernels run on them."""
    buffer = torch.empty(size + _ALIGNED, dtype=torch.uint8)
    shift = -buffer.data_ptr() % _ALIGNED
    return buffer[shift : shift + size]
