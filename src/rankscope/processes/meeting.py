"""Processes that do one thing together, and end it together: all with a result, or all with an error.

Nothing here is a collective operation. Ranks leave notes in the store that ``init_process_group`` opened, so one that
failed, has nothing to do or died holds up nobody for longer than ``patience``.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from rankscope._errors import ProcessError, RankscopeError

PATIENCE_SECONDS = 1800.0
_POLL_SECONDS = 0.01
_PARTING_SECONDS = 1.0
_CHUNK = 4 * 2**20
"""A store takes no more than 8 MiB in one note."""
_MEETINGS: Iterator[int] = itertools.count()


class Meeting:
    """This process among the others. Every rank opens its meetings in the same order.

    Args:
        patience: seconds without any news from any rank after which the others are given up.
    """

    def __init__(self, patience: float = PATIENCE_SECONDS) -> None:
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        own = torch.distributed.distributed_c10d._get_default_store()
        self._store: Store = PrefixStore(f"rankscope.meeting.{next(_MEETINGS)}", own)
        self._patience = patience
        self._gathered = 0

    def beat(self) -> None:
        """Say that this rank is at work; raise if another one failed."""
        self._store.add("beats", 1)
        self._check()

    def gather(self, payload: bytes) -> list[bytes]:
        """What every rank handed in, in order of ranks, on every rank.

        Raises:
            ProcessError: another rank failed, or nothing was heard of one for too long.
        """
        name = f"gather.{self._gathered}"
        self._gathered += 1
        chunks = [payload[start : start + _CHUNK] for start in range(0, len(payload), _CHUNK)]
        for number, chunk in enumerate(chunks):
            self._store.set(f"{name}.{self.rank}.{number}", chunk)  # type: ignore[arg-type]
        self._store.set(f"{name}.{self.rank}", str(len(chunks)))
        self._wait([f"{name}.{rank}" for rank in range(self.world)])
        found = [self._read(f"{name}.{rank}") for rank in range(self.world)]
        self._store.add(f"{name}.read", 1)
        self._close(name)
        return found

    def fail(self, error: BaseException) -> BaseException:
        """Tell the others of an error here; what to raise: it, or that of the rank that failed before."""
        words = " ".join(str(error).split()) or "no message"
        named = words if isinstance(error, RankscopeError) else f"{type(error).__name__}: {words}"
        try:
            first = self._store.compare_set("failed", "", json.dumps({"rank": self.rank, "error": named}))
            self._store.add("noted", 1)
            self._linger("noted", _PARTING_SECONDS)
        except RuntimeError:  # the store is gone, and with it the rank that held it: nobody is left to be told
            return error
        if isinstance(error, RankscopeError) or not isinstance(error, Exception):
            return error
        failed = json.loads(first)
        return error if failed["rank"] == self.rank else self._other(failed)

    def _check(self) -> None:
        if self._store.check(["failed"]):
            raise self._other(json.loads(self._store.get("failed")))

    def _other(self, failed: dict[str, object]) -> ProcessError:
        return ProcessError(f"Process {failed['rank']} of {self.world} failed: {failed['error']}")

    def _wait(self, keys: Sequence[str]) -> None:
        news, heard = -1, time.monotonic()
        while not self._store.check(list(keys)):
            self._check()
            if (beats := self._store.add("beats", 0)) != news:
                news, heard = beats, time.monotonic()
            if time.monotonic() - heard > self._patience:
                absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise ProcessError(
                    f"Nothing was heard of process {', '.join(map(str, absent))} of {self.world} for "
                    f"{self._patience:g} s. Every process of the group must make the same call; see whether it runs."
                )
            time.sleep(_POLL_SECONDS)

    def _read(self, key: str) -> bytes:
        return b"".join(self._store.get(f"{key}.{number}") for number in range(int(self._store.get(key))))

    def _close(self, name: str) -> None:
        """Take the notes away when all have read them."""
        self._linger(f"{name}.read", self._patience)
        if self.rank == 0:
            for rank in range(self.world):
                for number in range(int(self._store.get(f"{name}.{rank}"))):
                    self._store.delete_key(f"{name}.{rank}.{number}")

    def _linger(self, key: str, seconds: float) -> None:
        """The first rank may hold the store, and stays for a while until all have written this note."""
        deadline = time.monotonic() + seconds
        while self.rank == 0 and self._store.add(key, 0) < self.world and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


@contextmanager
def meeting(patience: float = PATIENCE_SECONDS) -> Iterator[Meeting]:
    """Open a meeting of all ranks; an error on one of them becomes an error on all.

    The rank that failed first raises its own error, and so does any other that rankscope refuses something to; what
    went wrong elsewhere as a consequence (a connection that closed, say) is raised as :class:`ProcessError`.
    """
    together = Meeting(patience)
    try:
        yield together
    except BaseException as error:
        raised = together.fail(error)
        if raised is error:
            raise
        raise raised from error


def in_group() -> bool:
    """Whether this process belongs to an initialised group of at least two."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return torch.distributed.get_world_size() > 1
