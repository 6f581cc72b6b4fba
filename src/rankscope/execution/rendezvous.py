"""Processes that do one thing together, and end it together: all with a result, or all with an error.

They tell each other by notes, so one that failed, has nothing to do or died holds up nobody for longer than
``patience``. A forward pass that takes all ranks is entered only when all have come to it: a rank that failed before
would leave the others waiting in a collective operation, or be met there by one of its next call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rankscope._errors import ProcessError, RankscopeError
from rankscope.execution.rank_store import Notes

PATIENCE_SECONDS = 1800.0
_PARTING_SECONDS = 1.0
_CHUNK = 4 * 2**20
"""A store takes no more than 8 MiB in one note."""


class Meeting:
    """This process among the others. Every rank opens its meetings in the same order.

    Args:
        patience: seconds without any news from any rank after which the others are given up.
    """

    def __init__(self, patience: float = PATIENCE_SECONDS) -> None:
        self._notes = Notes("meeting")
        self.rank, self.world = self._notes.rank, self._notes.world
        self._patience = patience
        self._gathered = self._assembled = 0

    def beat(self) -> None:
        """Say that this rank is at work; raise if another one failed."""
        self._notes.add("beats")
        self._check()

    def assemble(self) -> None:
        """Come together before what takes all ranks: all go on, or all raise.

        Raises:
            ProcessError: another rank failed, or did not come for too long.
        """
        self._assembled += 1
        self._notes.add("beats")
        if not self._notes.meet(f"assembly.{self._assembled}", patience=self._patience, unless="failed"):
            self._check()
            raise ProcessError(
                f"Not all {self.world} processes came within {self._patience:g} s. Every process of the group must "
                "make the same call; see whether they run."
            )

    def gather(self, payload: bytes) -> list[bytes]:
        """What every rank handed in, in order of ranks, on every rank.

        Raises:
            ProcessError: another rank failed, or nothing was heard of one for too long.
        """
        name = f"gather.{self._gathered}"
        self._gathered += 1
        chunks = [payload[start : start + _CHUNK] for start in range(0, len(payload), _CHUNK)]
        for number, chunk in enumerate(chunks):
            self._notes.write(f"{name}.{self.rank}.{number}", chunk)
        self._notes.write(f"{name}.{self.rank}", str(len(chunks)))
        self._wait([f"{name}.{rank}" for rank in range(self.world)])
        found = [self._read(f"{name}.{rank}") for rank in range(self.world)]
        self._notes.add(f"{name}.read")
        self._close(name)
        return found

    def fail(self, error: BaseException) -> BaseException:
        """Tell the others of an error here; what to raise: it, or that of the rank that failed before."""
        words = " ".join(str(error).split()) or "no message"
        named = words if isinstance(error, RankscopeError) else f"{type(error).__name__}: {words}"
        try:
            first = self._notes.write_first("failed", json.dumps({"rank": self.rank, "error": named}))
            self._notes.add("noted")
            if self.rank == 0:  # which may hold the store: stay for a while until all know
                self._notes.wait(lambda: self._notes.add("noted", 0) >= self.world, _PARTING_SECONDS)
        except RuntimeError:  # the store is gone, and with it the rank that held it: nobody is left to be told
            return error
        if isinstance(error, RankscopeError) or not isinstance(error, Exception):
            return error
        failed = json.loads(first)
        return error if failed["rank"] == self.rank else self._other(failed)

    def _check(self) -> None:
        if self._notes.has("failed"):
            raise self._other(json.loads(self._notes.read("failed")))

    def _other(self, failed: dict[str, object]) -> ProcessError:
        return ProcessError(f"Process {failed['rank']} of {self.world} failed: {failed['error']}")

    def _is_so(self, claim: bool) -> bool:
        """The claim; where it does not hold yet, it may be because another rank failed, which is raised."""
        if not claim:
            self._check()
        return claim

    def _wait(self, keys: Sequence[str]) -> None:
        def beats() -> int:
            return self._notes.add("beats", 0)

        if not self._notes.wait(lambda: self._is_so(self._notes.has(*keys)), self._patience, beats):
            absent = [rank for rank, key in enumerate(keys) if not self._notes.has(key)]
            raise ProcessError(
                f"Nothing was heard of process {', '.join(map(str, absent))} of {self.world} for "
                f"{self._patience:g} s. Every process of the group must make the same call; see whether it runs."
            )

    def _read(self, key: str) -> bytes:
        return b"".join(self._notes.read(f"{key}.{number}") for number in range(int(self._notes.read(key))))

    def _close(self, name: str) -> None:
        """The first rank, which may hold the store, takes the notes away when all have read them."""
        if self.rank == 0:
            self._notes.wait(lambda: self._is_so(self._notes.add(f"{name}.read", 0) >= self.world), self._patience)
            for rank in range(self.world):
                count = int(self._notes.read(f"{name}.{rank}"))
                self._notes.take_away(*(f"{name}.{rank}.{number}" for number in range(count)))


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
