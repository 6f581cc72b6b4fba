"""Entries that the ranks of a gauge read and write in the store that ``init_process_group`` opened.

Nothing here is a collective operation, and every wait has a timeout, so a rank that is late, has nothing to do or died
cannot make the others hang.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

_POLL_SECONDS = 0.005
_OPENED: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
_GO, _SKIP = "go", "skip"


class RankStore:
    """Entries that all ranks read and write. Every rank opens its stores for one purpose in the same order.

    Args:
        purpose: one word; stores with different purposes do not see each other's entries.
    """

    def __init__(self, purpose: str) -> None:
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        own = torch.distributed.distributed_c10d._get_default_store()
        self._store: Store = PrefixStore(f"rankscope.{purpose}.{next(_OPENED[purpose])}", own)
        self._met: str | None = None

    def write(self, key: str, value: str | bytes) -> None:
        """Set an entry, replacing an earlier value."""
        self._store.set(key, value)  # type: ignore[arg-type]

    def write_first(self, key: str, value: str) -> str:
        """Set an entry unless it exists; returns its value, which is the same on every rank."""
        return bytes(self._store.compare_set(key, "", value)).decode()

    def has(self, *keys: str) -> bool:
        """Whether all of these entries exist."""
        return bool(self._store.check(list(keys)))

    def read(self, key: str) -> bytes:
        """The value of an entry that exists."""
        return bytes(self._store.get(key))

    def add(self, key: str, amount: int = 1) -> int:
        """Increment a counter; returns its value. An amount of 0 only reads it."""
        return int(self._store.add(key, amount))

    def delete(self, *keys: str) -> None:
        """Remove entries that no rank reads any more."""
        for key in keys:
            self._store.delete_key(key)

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Poll until ``ready()``; returns False after ``seconds`` without it."""
        since = time.monotonic()
        while not ready():
            if time.monotonic() - since > seconds:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def meet(self, name: str, *, patience: float, unless: str) -> bool:
        """Whether all ranks reached the point called ``name``; the same answer on every rank.

        The last rank to arrive writes "go", a rank that times out writes "skip", and the first of the two counts.

        Args:
            name: name of this point in the program.
            patience: seconds to wait for the others.
            unless: an entry that ends the wait, because it means that a rank will not arrive.
        """
        verdict = f"verdict.{name}"
        before, self._met = self._met, name
        if self.add(f"arrived.{name}") == self.world:
            if before is not None:  # all ranks arrived here, so none still reads the previous entries
                self.delete(f"arrived.{before}", f"verdict.{before}")
            return self.write_first(verdict, _GO) == _GO
        self.wait(lambda: self.has(verdict) or self.has(unless), patience)
        # An atomic compare-and-set: "skip" after a timeout loses against a "go" that was written meanwhile.
        return self.write_first(verdict, _SKIP) == _GO
