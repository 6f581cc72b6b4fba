"""Notes that ranks leave for each other in the store that ``init_process_group`` opened.

Nothing here is a collective operation, and whoever waits for a note waits for a limited time: a rank that is behind,
has nothing to do or died cannot hold up the others.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

_OPENED: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
_POLL_SECONDS = 0.005
_GO, _SKIP = "go", "skip"


class Notes:
    """A board that all ranks write on and read. Every rank opens its boards for one purpose in the same order.

    Args:
        purpose: in one word; boards for different purposes do not know of each other.
    """

    def __init__(self, purpose: str) -> None:
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        own = torch.distributed.distributed_c10d._get_default_store()
        self._store: Store = PrefixStore(f"rankscope.{purpose}.{next(_OPENED[purpose])}", own)
        self._met: str | None = None

    def write(self, key: str, note: str | bytes) -> None:
        """Leave a note, over the one that was there."""
        self._store.set(key, note)  # type: ignore[arg-type]

    def write_first(self, key: str, note: str) -> str:
        """Leave a note unless there is one; what stands there now, which is the same for all who ask."""
        return bytes(self._store.compare_set(key, "", note)).decode()

    def has(self, *keys: str) -> bool:
        """Whether there is a note under each of these."""
        return bool(self._store.check(list(keys)))

    def read(self, key: str) -> bytes:
        """The note that is there."""
        return bytes(self._store.get(key))

    def add(self, key: str, amount: int = 1) -> int:
        """Count up; how far it has come, with 0 without a change."""
        return int(self._store.add(key, amount))

    def take_away(self, *keys: str) -> None:
        """Remove notes that nobody looks at any more."""
        for key in keys:
            self._store.delete_key(key)

    def wait(self, ready: Callable[[], bool], seconds: float, news: Callable[[], object] = lambda: None) -> bool:
        """Look until it is ready; whether it was, within so many seconds of the beginning or of the last news."""
        heard, since = news(), time.monotonic()
        while not ready():
            if (found := news()) != heard:
                heard, since = found, time.monotonic()
            if time.monotonic() - since > seconds:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def meet(self, name: str, *, patience: float, unless: str) -> bool:
        """Whether all ranks have come to the meeting of this name; the same answer on every one of them.

        The last to come writes "go", whoever loses patience writes "skip", and what was written first counts.

        Args:
            name: of the meeting.
            patience: seconds to wait for the others.
            unless: a note after which it is no use to wait, because a rank will not come.
        """
        verdict = f"verdict.{name}"
        before, self._met = self._met, name
        if self.add(f"arrived.{name}") == self.world:
            if before is not None:  # all have left the one before
                self.take_away(f"arrived.{before}", f"verdict.{before}")
            return self.write_first(verdict, _GO) == _GO
        self.wait(lambda: self.has(verdict) or self.has(unless), patience)
        return self.write_first(verdict, _SKIP) == _GO
