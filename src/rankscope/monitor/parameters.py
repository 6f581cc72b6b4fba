"""Norms of weights and gradients block by block, and which of them are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from rankscope._types import Status
from rankscope.linalg.to_host import to_host
from rankscope.models.view import ModelView
from rankscope.monitor.gradients import gathered
from rankscope.runs.readings import LayerValue
from rankscope.stream.frames import tensors_in

Of = Literal["weight", "gradient"]
SITE = "block.weights"
_DEEPEST = 8
"""Levels of tuples and mappings of a module's output that are looked into."""


@dataclass(frozen=True)
class ParameterNorms:
    """What one look at all weights, or all gradients, found.

    Attributes:
        rows: the norm over each block.
        not_finite: number of parameters with a NaN or an infinity.
        words: the first of them in the order of the model, and how many of its entries are not finite.
    """

    rows: tuple[LayerValue, ...]
    not_finite: int
    words: str


def parameter_norms(view: ModelView, of: Of) -> ParameterNorms:
    """The Frobenius norm of each block's weights or gradients.

    **Exact** up to rounding in float32. Norms of tensors that are sharded over ranks need all ranks. Integer tensors
    (quantised weights) and tensors without storage are left out.
    """
    named = {name: tensor for name, tensor in _tensors(view.model, of) if _is_readable(tensor)}
    norms = dict(zip(named, _norms(list(named.values())), strict=True))
    bad = tuple(name for name, norm in norms.items() if not math.isfinite(norm) and not _all_finite(named[name]))
    squares: dict[tuple[str | None, int], float] = {}
    homes = {
        call.module_name: (stack.name, call.first_layer) for stack in view.stacks for call in reversed(stack.calls)
    }
    for name, norm in norms.items():
        home = max((home for home in homes if name.startswith(f"{home}.")), key=len, default=None)
        if home is not None:
            squares[homes[home]] = squares.get(homes[home], 0.0) + norm * norm
    rows = [_row(f"{of}_norm", stack, layer, math.sqrt(square)) for (stack, layer), square in squares.items()]
    return ParameterNorms(tuple(rows), len(bad), _described(named, bad) if bad else "")


def _described(named: Mapping[str, Tensor], bad: Sequence[str]) -> str:
    tensor = gathered(named[bad[0]])
    entries = int((~torch.isfinite(_values(tensor))).sum())
    others = f", and {len(bad) - 1} of the other {len(named) - 1} parameters" if len(bad) > 1 else ""
    return f"{entries:,} of {tensor.numel():,} entries of {bad[0]}{others}"


@contextmanager
def watching_modules(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of modules whose output is not finite, in the order in which they return, as the model runs.

    A module returns after those inside it, so the first name is the innermost module in which it happened.
    """
    found: list[str] = []

    def look(name: str, module: nn.Module, args: object, output: object) -> None:
        for tensor in tensors_in(output, _DEEPEST):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                found.append(f"{name or 'the model'} ({type(module).__name__})")
                return

    handles = [module.register_forward_hook(partial(look, name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _tensors(model: nn.Module, of: Of) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        tensor = parameter if of == "weight" else parameter.grad
        if tensor is not None:
            yield name, tensor.detach()


def _is_readable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.is_meta


def _norms(tensors: Sequence[Tensor]) -> list[float]:
    """Frobenius norms, with one transfer per device."""
    norms = (gathered(torch.linalg.vector_norm(_values(tensor), dtype=_wide(tensor))) for tensor in tensors)
    return [float(norm) for norm in to_host([norm.float() for norm in norms])]


def _wide(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype is torch.float64 else torch.float32


def _values(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _all_finite(tensor: Tensor) -> bool:
    """Asked only if a norm is not finite, which squares of finite numbers can also cause."""
    return bool(gathered(torch.isfinite(_values(tensor)).all()))


def _row(metric: str, stack: str | None, layer: int, norm: float) -> LayerValue:
    if math.isfinite(norm):
        return LayerValue(metric, SITE, stack, layer, norm, norm, norm)
    return LayerValue(metric, SITE, stack, layer, math.nan, math.nan, math.nan, str(Status.NOT_FINITE))
