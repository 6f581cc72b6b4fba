"""Norms of the gradients of queries, keys and values, layer by layer.

Where all tokens are equal, scores do not depend on queries and keys, and their gradients are exactly zero while those
of the values are not (Noci et al., 2022).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rankscope._types import Status
from rankscope.monitor.projections import Part, Projections
from rankscope.runs.readings import LayerValue

SITE = "attention.weights"
RATIO = "qk_to_v_gradient"


def gradient_values(
    model: nn.Module, projections: Mapping[tuple[str | None, int], Projections]
) -> tuple[LayerValue, ...]:
    r"""Per layer :math:`\|\nabla W_Q\|`, :math:`\|\nabla W_K\|`, :math:`\|\nabla W_V\|` and one ratio of them.

    **Exact.** The ratio is :math:`\sqrt{\|\nabla W_Q\|^2 + \|\nabla W_K\|^2} / \|\nabla W_V\|`: 0 at collapse,
    undefined where the value gradient is zero. A loss scale cancels in it, and only in it. Parameters without a
    gradient are left out. Gradients sharded over ranks are gathered, one parameter at a time: all ranks must take part.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: list[LayerValue] = []
    for (stack, layer), parts in projections.items():
        norms = [_norm(parameters[part.name], part) for part in (parts.query, parts.key, parts.value)]
        if any(norm is None for norm in norms):
            continue
        query, key, value = (math.nan if norm is None else norm for norm in norms)
        ratio = math.hypot(query, key) / value if value > 0.0 else math.nan
        named = {"q_gradient": query, "k_gradient": key, "v_gradient": value, RATIO: ratio}
        found += [_row(metric, stack, layer, number) for metric, number in named.items()]
    return tuple(found)


def _row(metric: str, stack: str | None, layer: int, number: float) -> LayerValue:
    if math.isfinite(number):
        return LayerValue(metric, SITE, stack, layer, number, number, number)
    status = Status.UNDEFINED if metric == RATIO else Status.NOT_FINITE
    return LayerValue(metric, SITE, stack, layer, math.nan, math.nan, math.nan, str(status))


def _norm(parameter: nn.Parameter, part: Part) -> float | None:
    if parameter.grad is None:
        return None
    gradient = part.of(_whole(parameter.grad.detach()))
    return float(torch.linalg.vector_norm(gradient, dtype=_widest(gradient)))


def _widest(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _whole(gradient: Tensor) -> Tensor:
    if not torch.distributed.is_available():
        return gradient
    from torch.distributed.tensor import DTensor

    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
