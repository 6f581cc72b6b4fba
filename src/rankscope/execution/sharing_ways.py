"""In which way several processes share a measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import nn

from rankscope._errors import InputError
from rankscope.models.spread import in_group, spread_of

Parallel = Literal["data", "fsdp", "tensor"]
WAYS: tuple[Parallel, ...] = ("data", "fsdp", "tensor")


def way_of(model: str | Path | nn.Module, parallel: Parallel | None) -> Parallel | None:
    """The way asked for, or that in which a module is spread already; None where this process works alone.

    Raises:
        InputError: it does not go with the model or with the number of processes.
    """
    if parallel is not None and parallel not in WAYS:
        raise InputError(f"parallel={parallel!r} is not one of {', '.join(WAYS)}.")
    if not isinstance(model, nn.Module):
        if parallel in ("fsdp", "tensor") and not in_group():
            raise InputError(
                f"parallel={parallel!r} spreads a model over several processes, and there is one. Start several, e.g. "
                "torchrun --nproc-per-node 2 -m rankscope measure ..., or leave it out."
            )
        return parallel if in_group() else None
    spread = spread_of(model)
    if spread is None and parallel in ("fsdp", "tensor"):
        raise InputError(
            f"parallel={parallel!r}: a module that is handed over is not changed, and this one is not spread. Call "
            "fully_shard on it or load it with a tensor-parallel plan yourself, or pass the folder it lies in."
        )
    if spread is not None and in_group():
        if parallel is not None and parallel != spread:
            raise InputError(f"parallel={parallel!r}, but this module is spread already: {spread}. Leave it out.")
        return spread
    return parallel if in_group() else None
