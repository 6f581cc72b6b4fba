"""How many sequences and path lengths at a time a budget of memory allows ``decompose``."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from rankscope.execution.offload.budget import parse_size
from rankscope.models.inputs import Prepared
from rankscope.models.view import ModelView
from rankscope.paths.lengths import ORIGINS, MemoryPlan, plan_memory
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import trace

GIB = 2**30
SMALLEST_SIZE = 1024
"""Below it a bare number was meant in GiB."""


def bytes_in(memory: int | str | float) -> int:
    """A budget in bytes, from ``"3GiB"`` or a number of bytes.

    Example:
        >>> bytes_in("1.5 MiB")
        1572864
    """
    try:
        bare = float(memory)
    except ValueError:
        return parse_size(str(memory))
    if bare >= SMALLEST_SIZE:
        return int(bare)
    told = f"decompose(memory={memory}) is read as GiB, as before; write memory='{memory}GiB' instead."
    warnings.warn(told, DeprecationWarning, stacklevel=3)
    return max(1, int(bare * GIB))


def planned_memory(
    view: ModelView,
    prepared: Prepared,
    memory: int,
    dtype: torch.dtype | None,
    *,
    batch: int,
    origins: bool,
    kept: bool,
    rerun: bool,
) -> MemoryPlan:
    """Read the sizes of the stream off one pass, and fit the budget.

    Args:
        view: the model.
        prepared: inputs of one sequence each.
        memory: the budget in bytes.
        dtype: of the sums; None for the model's own, at least float32.
        batch: sequences per pass that are wanted.
        origins: whether embedding, MLPs and biases are kept apart.
        kept: whether the sums before each block are kept for marginals.
        rerun: whether blocks are run again, for Jacobians.
    """
    sizes: dict[str, torch.Size] = {}
    itemsize = 4

    def observe(ref: SiteRef, seen: Tensor | AttentionCall) -> None:
        nonlocal itemsize
        if isinstance(seen, Tensor):
            itemsize = max(4, seen.element_size()) if dtype is None else dtype.itemsize
            sizes.setdefault("stream", seen.shape)
        elif seen.weights is not None:
            sizes.setdefault("heads", seen.weights.shape)
        elif seen.query is not None:
            sizes.setdefault("heads", seen.query.shape)

    with trace(view, SiteSelection.parse(["block.in@0", "attention.probs@0"]), observe):
        prepared[0].run(view.model)
    _, tokens, dim = sizes["stream"]
    heads = sizes["heads"][1] if "heads" in sizes else 1
    depth = max(stack.depth for stack in view.stacks)
    most = min(batch, sum(part.sequences for part in prepared))
    return plan_memory(
        memory,
        sequences=most,
        tokens=tokens,
        dim=dim,
        depth=depth,
        heads=heads,
        itemsize=itemsize,
        origins=len(ORIGINS) if origins else 1,
        kept=kept,
        rerun=rerun,
    )
