"""How ranks synchronise: a gloo group of their own, in which each sends all others what it has, or how it failed.

The ranks make the same calls in the same order. Every call exchanges one message of each rank, so an error on one rank
ends the work of all at their next call. A forward pass that contains collectives itself (FSDP, tensor parallel) starts
only after such a call: otherwise a rank that failed earlier would leave the others waiting inside a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor

from rankscope.errors import ProcessError, RankscopeError

PATIENCE_SECONDS = 1800.0
"""For a rank that runs and says nothing: one forward pass of a large model on a slow machine may take long."""
_WELL, _FAILED = b"\0", b"\1"


class Rendezvous:
    """This rank among the others, in one piece of shared work. Every rank opens its rendezvous in the same order.

    Args:
        patience: seconds to wait for the other ranks.

    Raises:
        ProcessError: another rank did not open its rendezvous in time.
    """

    def __init__(self, patience: float = PATIENCE_SECONDS) -> None:
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._patience = patience
        self._is_over = False
        with self._all_present():
            self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=patience))

    def barrier(self) -> None:
        """Wait for all ranks before work that needs them all.

        Raises:
            ProcessError: another rank failed, or did not arrive in time.
        """
        self._exchange(_WELL)

    def gather(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks, in the order of ranks, on every rank.

        Raises:
            ProcessError: another rank failed, or did not arrive in time.
        """
        return self._exchange(_WELL + payload)

    def fail(self, error: BaseException) -> None:
        """Report an error to the other ranks at their next call, unless it came from there or ends the process."""
        if self._is_over or not isinstance(error, Exception):
            return
        words = " ".join(str(error).split()) or "no message"
        named = words if isinstance(error, RankscopeError) else f"{type(error).__name__}: {words}"
        try:
            self._exchange(_FAILED + named.encode())
        except ProcessError:  # this error itself, which every rank gets to hear, or the others are gone
            return

    def close(self) -> None:
        """Release the group, which no rank uses any more."""
        torch.distributed.destroy_process_group(self._group)

    def _exchange(self, message: bytes) -> list[bytes]:
        with self._all_present():
            # It names the ranks that are missing; a collective operation would only time out.
            torch.distributed.monitored_barrier(self._group, timedelta(seconds=self._patience), wait_all_ranks=True)
            sizes = [int(size) for size in self._gathered(torch.tensor([len(message)]))]
            own = torch.zeros(max(sizes), dtype=torch.uint8)
            own[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            padded = self._gathered(own)
        found = [bytes(part[:size].numpy()) for part, size in zip(padded, sizes, strict=True)]
        for rank, part in enumerate(found):
            if part[:1] == _FAILED:
                self._is_over = True
                raise ProcessError(f"Process {rank} of {self.world} failed: {part[1:].decode()}")
        return [part[1:] for part in found]

    def _gathered(self, own: Tensor) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(self.world)]
        torch.distributed.all_gather(found, own, group=self._group)
        return found

    @contextmanager
    def _all_present(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._is_over = True
            raise ProcessError(
                f"Not all {self.world} processes arrived within {self._patience:g} s, or one has stopped. Every "
                "process of the group must make the same call; look at the output of each, and at the system's log "
                f"(out of memory?). torch.distributed says: {str(error).partition(chr(10))[0]}"
            ) from error


@contextmanager
def rendezvous(patience: float = PATIENCE_SECONDS) -> Iterator[Rendezvous]:
    """Open a rendezvous of all ranks; an error on one rank becomes a :class:`ProcessError` on all others."""
    ranks = Rendezvous(patience)
    try:
        yield ranks
        ranks.barrier()  # whoever failed after its last call says so here
    except BaseException as error:
        ranks.fail(error)
        raise
    ranks.close()
