"""Models spread over processes: how one is told, and left as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankscope.errors import InputError

Spread = Literal["fsdp", "tensor"]


def in_group() -> bool:
    """Whether this process belongs to an initialised group of at least two."""
    return _initialised() and torch.distributed.get_world_size() > 1


def fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """The modules ``fully_shard`` was called on, innermost last."""
    if not _initialised():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _initialised() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def needs_all_ranks(model: nn.Module) -> bool:
    """Whether a forward pass communicates: parameters are spread over the ranks (FSDP, tensor parallel)."""
    if not _initialised():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    return (
        bool(fsdp_modules(model))
        or any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
        or any(isinstance(parameter, DTensor) for parameter in model.parameters())
    )


def spread_of(model: nn.Module) -> Spread | None:
    """How a model is spread over all ranks: its weights (FSDP) or single products (tensor parallel); None if it is not.

    Raises:
        InputError: it is spread in both ways at once, or over some of the ranks only.
    """
    if not needs_all_ranks(model):
        return None
    laid_out = [parameter for parameter in model.parameters() if is_distributed(parameter)]
    if fsdp_modules(model):
        if any(_axes(parameter) > 1 for parameter in laid_out):
            raise InputError(
                "The model is spread by FSDP and by tensor parallelism at once. Measure it spread in one way: load it "
                "with one of them over all processes."
            )
        return "fsdp"
    ranks = {parameter.device_mesh.size() for parameter in laid_out}  # type: ignore[attr-defined]
    world = torch.distributed.get_world_size()
    if ranks - {world}:
        raise InputError(
            f"The model is tensor-parallel over {', '.join(map(str, sorted(ranks)))} of {world} processes. Spread it "
            "over all of them, or start fewer."
        )
    return "tensor" if laid_out else "fsdp"


def _axes(parameter: Any) -> int:
    """Over how many axes of ranks a parameter is cut; replicas (as in hybrid FSDP) are no cut."""
    return sum(not placement.is_replicate() for placement in parameter.placements)


def is_distributed(tensor: object) -> bool:
    """Whether this is a ``DTensor``."""
    if not _initialised():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or the whole of a ``DTensor``; a collective operation for those."""
    found: Any = tensor
    gathered: Tensor = found.full_tensor() if is_distributed(tensor) else tensor
    return gathered


@contextmanager
def resharded(model: nn.Module) -> Iterator[None]:
    """Without a backward pass FSDP2 leaves parameters gathered, where the optimizer's next step does not reach them."""
    try:
        yield
    finally:
        for module in fsdp_modules(model):
            module.reshard()  # type: ignore[operator]
