"""Initialises the process group from the environment that a launcher sets, and destroys it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from rankscope.errors import InputError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = timedelta(minutes=30)


def launched(environment: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Rank of this process and number of processes, as ``torchrun`` sets them; None if there is only one.

    Example:
        >>> launched({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
        (1, 4)
        >>> launched({}) is None
        True
    """
    variables = os.environ if environment is None else environment
    if any(not variables.get(name) for name in _VARIABLES):
        return None
    try:
        rank, world = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    except ValueError:
        raise InputError(
            f"RANK={variables['RANK']!r} and WORLD_SIZE={variables['WORLD_SIZE']!r} in the environment must be whole "
            "numbers. Start the processes with torchrun, or unset both."
        ) from None
    if not 0 <= rank < world:
        raise InputError(f"RANK={rank} in the environment must be in 0..{world - 1}, because WORLD_SIZE={world}.")
    return (rank, world) if world > 1 else None


@contextmanager
def joined() -> Iterator[None]:
    """Join the process group of the launcher: gloo on a CPU, torch's default if CUDA is available.

    After an error the group is not destroyed: that could wait for ranks that hang, whereas exiting cannot.
    """
    import torch

    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.distributed.init_process_group(None if on_cuda else "gloo", timeout=_TIMEOUT)
    try:
        yield
    except SystemExit as left:
        if not left.code:
            torch.distributed.destroy_process_group()
        raise
    torch.distributed.destroy_process_group()
