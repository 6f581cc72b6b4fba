"""Commands under ``torchrun``: the processes share the work, and one of them prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from rankscope.errors import InputError
from rankscope.execution.launching import joined, launched
from rankscope.verbs._spec import verbs_in_order

EXIT_ELSEWHERE = 2
"""The exit code of a process whose error another process has reported."""


def way(asked: str | None) -> str | None:
    """The ``parallel`` argument of a verb: ``"data"`` if several processes run and the user chose nothing."""
    if asked is None:
        return "data" if launched() is not None else None
    return asked


def is_first() -> bool:
    """Whether this process saves and shows the result."""
    rank_and_world = launched()
    return rank_and_world is None or rank_and_world[0] == 0


@contextmanager
def one_voice(words: Sequence[str]) -> Iterator[None]:
    """Join the process group of the launcher, if there is one, for the duration of a command.

    Only the first process prints. An error is reported once, by the first process that meets it.

    Raises:
        InputError: a command that several processes would only repeat.
    """
    rank_and_world = launched()
    if rank_and_world is None or {"--help", "--help-all"} & set(words):
        yield
        return
    rank, world = rank_and_world
    command = next((word for word in words if not word.startswith("-")), None)
    shared = [verb.name for verb in verbs_in_order() if verb.is_shared]
    if command not in shared:
        if rank > 0:
            sys.exit(EXIT_ELSEWHERE)
        raise InputError(
            f"{world} processes were started, and rankscope {command or ''} does not share its work among them. Run it "
            f"without torchrun; {', '.join(shared)} do."
        )
    with joined():
        try:
            with _silence(rank > 0):
                yield
        except Exception:
            if not _speaks(rank):
                sys.exit(EXIT_ELSEWHERE)
            if rank > 0:
                print(f"process {rank} of {world}: ", end="", file=sys.stderr, flush=True)
            raise


@contextmanager
def _silence(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _speaks(rank: int) -> bool:
    """Whether this process is the first to report an error."""
    from torch.distributed.distributed_c10d import _get_default_store

    return bool(_get_default_store().compare_set("rankscope.error", "", str(rank)) == str(rank).encode())
