"""Several processes, one gauge: who speaks, when all look, and what happens when one does not come.

Deciding when to look takes no collective operation: ranks leave notes in the store that ``init_process_group`` opened,
and whoever waits for a note waits for a limited time. So a rank that is behind, has no batch or died cannot hold up the
others.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store

from rankscope.results.readings import LayerValue

_GAUGES: Iterator[int] = itertools.count()
_POLL_SECONDS = 0.005
_GO, _SKIP = b"go", b"skip"


class Ranks:
    """This process among the others; alone where ``torch.distributed`` is not initialised.

    Args:
        patience: seconds to wait for other ranks where a forward pass needs them.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._store: Store | None = None
        self._met: int | None = None
        self.rank, self.world = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if self.world > 1:
            own = torch.distributed.distributed_c10d._get_default_store()
            self._store = PrefixStore(f"rankscope.gauge.{next(_GAUGES)}", own)

    @property
    def is_first(self) -> bool:
        """Whether this rank logs, records and calls functions."""
        return self.rank == 0

    def announce(self, step: int) -> None:
        """Let every rank read at the first step from this one on."""
        if self._store is not None:
            self._store.set("announced", str(step))

    def announced(self) -> int | None:
        """The step announced last, by the first rank."""
        if self._store is None or not self._store.check(["announced"]):
            return None
        return int(self._store.get("announced"))

    def leave(self) -> None:
        """This rank will not come any more; the others need not wait."""
        if self._store is not None:
            self._store.set("left", str(self.rank))

    def meet(self, step: int) -> bool:
        """Whether all ranks are here to read this step; the same answer on every one of them.

        The last to come writes "go", whoever loses patience writes "skip", and what was written first counts.
        """
        if self._store is None:
            return True
        store, verdict = self._store, f"verdict.{step}"
        before, self._met = self._met, step
        arrived = store.add(f"arrived.{step}", 1)
        if arrived == self.world:
            self._forget(before)
            return self._settle(verdict, _GO)
        deadline = time.monotonic() + self._patience
        while not store.check([verdict]):
            if time.monotonic() > deadline or store.check(["left"]):
                return self._settle(verdict, _SKIP)
            time.sleep(_POLL_SECONDS)
        return bool(store.get(verdict) == _GO)

    def _forget(self, step: int | None) -> None:
        """Once all have come to a meeting, nobody looks at the notes of the one before any more."""
        if self._store is not None and step is not None:
            self._store.delete_key(f"arrived.{step}")
            self._store.delete_key(f"verdict.{step}")

    def _settle(self, key: str, proposal: bytes) -> bool:
        assert self._store is not None
        return bool(self._store.compare_set(key, "", proposal.decode()) == _GO)


def same_as_first(values: tuple[LayerValue, ...], model: nn.Module) -> tuple[LayerValue, ...]:
    """The numbers of the first rank on every rank, so that all decide alike. All ranks must take part."""
    device = next(model.parameters()).device
    numbers = torch.tensor([[row.mean, row.least, row.most] for row in values], dtype=torch.float64, device=device)
    torch.distributed.broadcast(numbers, src=0)
    return tuple(
        replace(row, mean=mean, least=least, most=most)
        for row, (mean, least, most) in zip(values, numbers.tolist(), strict=True)
    )
