"""A command that ``torchrun`` starts in several processes: they share the work, and one of them speaks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from enum import Enum
from typing import Any, Literal

import typer

from rankscope._errors import InputError
from rankscope.execution.launching import joined, launched
from rankscope.execution.support import SUPPORT

SHARED = tuple(verb for verb, support in SUPPORT.items() if "data" in support.parallel_modes)
EXIT_ELSEWHERE = 2
"""The code of a process whose error another one has told."""


class Way(str, Enum):
    """How several processes share the work."""

    data = "data"
    fsdp = "fsdp"
    tensor = "tensor"


def parallel_option(verb: str) -> Any:
    """``--parallel`` of a verb, with the reason why it does not take some of the modes."""
    reason = SUPPORT[verb].no_spread
    rest = ", or spread the model." if reason is None else f". Not fsdp or tensor: {reason}."
    return typer.Option("--parallel", help=f"Under torchrun: deal out batches (data, the default){rest}")


def way(asked: Way | None) -> Literal["data", "fsdp", "tensor"] | None:
    """What a verb is told: the batches are dealt out where several processes run and nobody said how."""
    if asked is None:
        return "data" if launched() is not None else None
    return asked.value


def is_first() -> bool:
    """Whether this process saves and shows the result."""
    found = launched()
    return found is None or found[0] == 0


@contextmanager
def one_voice(words: Sequence[str]) -> Iterator[None]:
    """Belong to the group of the launcher, if there is one, for the length of a command.

    Processes other than the first are silent. An error is told by whoever comes to it first, once.

    Raises:
        InputError: a command that several processes would only repeat.
    """
    found = launched()
    if found is None or "--help" in words:
        yield
        return
    rank, world = found
    command = next((word for word in words if not word.startswith("-")), None)
    if command not in SHARED:
        if rank > 0:
            sys.exit(EXIT_ELSEWHERE)
        raise InputError(
            f"{world} processes were started, and rankscope {command or ''} does not share its work among them. Run it "
            f"without torchrun; {', '.join(SHARED)} do."
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
    """Whether this process is the first of all to say that something is wrong."""
    from torch.distributed.distributed_c10d import _get_default_store

    return bool(_get_default_store().compare_set("rankscope.error", "", str(rank)) == str(rank).encode())
