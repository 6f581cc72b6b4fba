"""How ranks synchronise: entries in the store that ``init_process_group`` opened, and a rendezvous built on them.

Nothing here is a collective operation, and every wait has a timeout, so a rank that is late, has nothing to do or died
cannot make the others hang. A forward pass that does contain collectives (FSDP, tensor parallel) starts only after a
:meth:`Rendezvous.barrier`: otherwise a rank that failed earlier would leave the others waiting inside a collective, or
join it with one that belongs to its next call.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from rankscope.errors import ProcessError, RankscopeError

PATIENCE_SECONDS = 1800.0
"""For a rank that runs and says nothing: one forward pass of a large model on a slow machine may take long."""
SILENT_SECONDS = 20.0
"""For a rank whose pulse has stopped: its process was killed or suspended."""
_PULSE_SECONDS = 2.0
_PARTING_SECONDS = 1.0
_POLL_SECONDS = 0.005
_CHUNK = 4 * 2**20
"""A store accepts at most 8 MiB in one entry."""
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

    def wait(self, ready: Callable[[], bool], seconds: float, news: Callable[[], object] = lambda: None) -> bool:
        """Poll until ``ready()``; returns False after ``seconds`` without it and without a change of ``news()``."""
        heard, since = news(), time.monotonic()
        while not ready():
            if (latest := news()) != heard:
                heard, since = latest, time.monotonic()
            if time.monotonic() - since > seconds:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def meet(self, name: str, *, patience: float, unless: str, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Whether all ranks reached the point called ``name``; the same answer on every rank.

        The last rank to arrive writes "go", a rank that times out writes "skip", and the first of the two counts.

        Args:
            name: name of this point in the program.
            patience: seconds to wait for the others.
            unless: an entry that ends the wait, because it means that a rank will not arrive.
            given_up: asked while waiting; ends the wait as well.
        """
        verdict = f"verdict.{name}"
        before, self._met = self._met, name
        if self.add(f"arrived.{name}") == self.world:
            if before is not None:  # all ranks arrived here, so none still reads the previous entries
                self.delete(f"arrived.{before}", f"verdict.{before}")
            return self.write_first(verdict, _GO) == _GO
        self.wait(lambda: self.has(verdict) or self.has(unless) or given_up(), patience)
        # An atomic compare-and-set: "skip" after a timeout loses against a "go" that was written meanwhile.
        return self.write_first(verdict, _SKIP) == _GO


class Rendezvous:
    """This rank among the others, in one piece of shared work. Every rank opens its rendezvous in the same order.

    Args:
        patience: seconds without a heartbeat from any rank after which to give up on the others.
    """

    def __init__(self, patience: float = PATIENCE_SECONDS) -> None:
        self._store = RankStore("rendezvous")
        self.rank, self.world = self._store.rank, self._store.world
        self._patience = patience
        self._gathered = self._barriers = 0
        self._pulses = {rank: (0, time.monotonic()) for rank in range(self.world) if rank != self.rank}
        self._felt = 0.0

    @contextmanager
    def pulse(self) -> Iterator[None]:
        """Inside this context a thread tells the other ranks every two seconds that this process still exists.

        A rank may compute for minutes without a word, and one that was killed says nothing either: without the pulse
        the others could not tell the two apart.
        """
        over = threading.Event()

        def beat() -> None:
            try:
                while not over.is_set():
                    self._store.add(f"pulse.{self.rank}")
                    over.wait(_PULSE_SECONDS)
            except RuntimeError:  # the store is gone with the rank that hosted it; the main thread notices by itself
                return

        thread = threading.Thread(target=beat, name="rankscope-pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_PULSE_SECONDS)

    def _silent(self) -> list[int]:
        """Ranks that have had a pulse and have none any more; those that have not begun are not among them."""
        now = time.monotonic()
        if now - self._felt > min(1.0, SILENT_SECONDS / 4):
            self._felt = now
            for rank, (beats, _) in self._pulses.items():
                if (latest := self._store.add(f"pulse.{rank}", 0)) != beats:
                    self._pulses[rank] = latest, now
        return [rank for rank, (beats, since) in self._pulses.items() if beats and now - since > SILENT_SECONDS]

    def _refuse_silent(self, waited_for: Sequence[int]) -> None:
        gone = [rank for rank in self._silent() if rank in waited_for]
        if gone:
            raise ProcessError(
                f"Process {', '.join(map(str, gone))} of {self.world} has stopped: no sign of life for "
                f"{SILENT_SECONDS:g} s. It was killed or suspended; look at its output and the system's log (out of "
                "memory?), and start all processes again."
            )

    def heartbeat(self) -> None:
        """Signal that this rank is alive; raises if another rank failed."""
        self._store.add("beats")
        self._check()

    def barrier(self) -> None:
        """Wait for all ranks before work that needs them all: every rank continues, or every rank raises.

        Raises:
            ProcessError: another rank failed, or did not arrive in time.
        """
        self._barriers += 1
        self._store.add("beats")
        if not self._store.meet(
            f"barrier.{self._barriers}",
            patience=self._patience,
            unless="failed",
            given_up=lambda: bool(self._silent()),
        ):
            self._check()
            self._refuse_silent(range(self.world))
            raise ProcessError(
                f"Not all {self.world} processes arrived within {self._patience:g} s. Every process of the group must "
                "make the same call; check that they are running."
            )

    def gather(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks, in the order of ranks, on every rank.

        Raises:
            ProcessError: another rank failed, or did not respond in time.
        """
        name = f"gather.{self._gathered}"
        self._gathered += 1
        chunks = [payload[start : start + _CHUNK] for start in range(0, len(payload), _CHUNK)]
        for number, chunk in enumerate(chunks):
            self._store.write(f"{name}.{self.rank}.{number}", chunk)
        # Written last: it tells the other ranks that all chunks are there.
        self._store.write(f"{name}.{self.rank}", str(len(chunks)))
        self._wait([f"{name}.{rank}" for rank in range(self.world)])
        parts = [self._read(f"{name}.{rank}") for rank in range(self.world)]
        self._store.add(f"{name}.read")
        self._close(name)
        return parts

    def fail(self, error: BaseException) -> BaseException:
        """Report an error to the other ranks; returns the one to raise: this, or that of the first rank to fail."""
        words = " ".join(str(error).split()) or "no message"
        named = words if isinstance(error, RankscopeError) else f"{type(error).__name__}: {words}"
        try:
            first = self._store.write_first("failed", json.dumps({"rank": self.rank, "error": named}))
            self._store.add("noted")
            if self.rank == 0:  # may host the store: wait a moment until all ranks know
                self._store.wait(lambda: self._store.add("noted", 0) >= self.world, _PARTING_SECONDS)
        except RuntimeError:  # the store is gone with the rank that hosted it: there is nobody to inform
            return error
        if isinstance(error, RankscopeError) or not isinstance(error, Exception):
            return error
        failed = json.loads(first)
        return error if failed["rank"] == self.rank else self._other(failed)

    def _check(self) -> None:
        if self._store.has("failed"):
            raise self._other(json.loads(self._store.read("failed")))

    def _other(self, failed: dict[str, object]) -> ProcessError:
        return ProcessError(f"Process {failed['rank']} of {self.world} failed: {failed['error']}")

    def _unless_failed(self, ready: bool) -> bool:
        """Return ``ready``; if it is False, raise if another rank failed."""
        if not ready:
            self._check()
        return ready

    def _wait(self, keys: Sequence[str]) -> None:
        def beats() -> int:
            return self._store.add("beats", 0)

        def ready() -> bool:
            if self._unless_failed(self._store.has(*keys)):
                return True
            if self._silent():
                self._refuse_silent([rank for rank, key in enumerate(keys) if not self._store.has(key)])
            return False

        if not self._store.wait(ready, self._patience, beats):
            absent = [rank for rank, key in enumerate(keys) if not self._store.has(key)]
            raise ProcessError(
                f"Process {', '.join(map(str, absent))} of {self.world} did not respond for {self._patience:g} s. "
                "Every process of the group must make the same call; check that it is running."
            )

    def _read(self, key: str) -> bytes:
        return b"".join(self._store.read(f"{key}.{number}") for number in range(int(self._store.read(key))))

    def _close(self, name: str) -> None:
        """On the first rank, which may host the store, remove the payloads once all ranks have read them."""
        if self.rank == 0:
            self._store.wait(
                lambda: self._unless_failed(self._store.add(f"{name}.read", 0) >= self.world) or bool(self._silent()),
                self._patience,
            )
            for rank in range(self.world):
                count = int(self._store.read(f"{name}.{rank}"))
                self._store.delete(*(f"{name}.{rank}.{number}" for number in range(count)))


@contextmanager
def rendezvous(patience: float = PATIENCE_SECONDS) -> Iterator[Rendezvous]:
    """Open a rendezvous of all ranks; an error on one rank becomes an error on all.

    The first rank to fail raises its own error, and so does any other rank with a rankscope error. Errors that follow
    on other ranks (a closed connection, for example) are raised as :class:`ProcessError`.
    """
    ranks = Rendezvous(patience)
    try:
        with ranks.pulse():
            yield ranks
    except BaseException as error:
        raised = ranks.fail(error)
        if raised is error:
            raise
        raise raised from error
