"""Finds the first module that returns NaN or infinity."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankscope.models.inputs import Batch
from rankscope.stream.viewing import undisturbed


def where_it_breaks(model: nn.Module, batches: Iterable[Batch]) -> list[str]:
    """Describe the first module whose inputs are finite and whose output is not; takes one more pass.

    Returns:
        An empty list if the output of every module is finite: then the values were lost between modules.
    """
    for batch in batches:
        place = _in_batch(model, batch)
        if place is not None:
            return [place]
    return []


def _in_batch(model: nn.Module, batch: Batch) -> str | None:
    names = {module: name for name, module in model.named_modules()}
    modules: list[nn.Module] = []

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if not modules and not _all_finite(output) and _all_finite(inputs):
            modules.append(module)

    hooks = [module.register_forward_hook(look) for module in names]
    try:
        with undisturbed(model):
            batch.run(model)
    finally:
        for hook in hooks:
            hook.remove()
    if not modules:
        return None
    module = modules[0]
    return f"The first module to return NaN or infinity is {names[module]} ({type(module).__name__}){_why(module)}."


def _why(module: nn.Module) -> str:
    for name, parameter in module.named_parameters():
        lost = int((~torch.isfinite(parameter.detach())).sum())
        if lost:
            return f"; its {name} holds {lost} of {parameter.numel():,} values that are not finite"
    return "; its own weights are finite, so its inputs are too large for the format it computes in"


def _all_finite(value: Any) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors)
