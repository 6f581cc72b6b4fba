"""Norms of weights and gradients block by block, and which of them are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from rankscope._types import Status
from rankscope.linalg.to_host import to_host
from rankscope.models.view import ModelView
from rankscope.models.wrapping import whole
from rankscope.monitor.readings import LayerValue
from rankscope.stream.frames import tensors_in

Of = Literal["weight", "gradient"]
SITE = "block.weights"


@dataclass(frozen=True)
class ParameterNorms:
    """What one look at all weights, or all gradients, found.

    Attributes:
        rows: the norm over each block.
        total: the norm over the whole model.
        number: how many parameters were looked at.
        bad: names of the parameters with a NaN or an infinity, in the order of the model.
        of: the norm of each parameter, by name.
    """

    rows: tuple[LayerValue, ...]
    total: float
    number: int
    bad: tuple[str, ...]
    of: Mapping[str, float]


def parameter_norms(view: ModelView, of: Of) -> ParameterNorms:
    """The Frobenius norm of each block's weights or gradients.

    **Exact** up to rounding in float32. Norms of tensors that are sharded over ranks need all ranks. Integer tensors
    (quantised weights) and tensors without storage are left out.
    """
    named = {name: tensor for name, tensor in tensors_of(view.model, of) if is_readable(tensor)}
    norms = dict(zip(named, _norms(list(named.values())), strict=True))
    bad = tuple(name for name, norm in norms.items() if not math.isfinite(norm) and not _all_finite(named[name]))
    squares: dict[tuple[str | None, int], float] = {}
    for name, home in homes_of(view, norms).items():
        squares[home] = squares.get(home, 0.0) + norms[name] ** 2
    rows = [block_row(f"{of}_norm", stack, layer, math.sqrt(square)) for (stack, layer), square in squares.items()]
    total = math.sqrt(math.fsum(norm * norm for norm in norms.values()))
    return ParameterNorms(tuple(rows), total, len(norms), bad, norms)


def described(view: ModelView, name: str) -> str:
    """The name of a parameter and its block, if it has one: ``"layers.1.linear1.weight (block 1)"``."""
    for stack, layer in homes_of(view, [name]).values():
        return f"{name} (block {layer}{f' of the {stack}' if stack else ''})"
    return name


def homes_of(view: ModelView, names: Iterable[str]) -> dict[str, tuple[str | None, int]]:
    """Stack and layer of every parameter that belongs to a block."""
    first = {
        call.module_name: (stack.name, call.first_layer) for stack in view.stacks for call in reversed(stack.calls)
    }
    found = {}
    for name in names:
        block = max((block for block in first if name.startswith(f"{block}.")), key=len, default=None)
        if block is not None:
            found[name] = first[block]
    return found


def bad_entries(model: nn.Module, of: Of, bad: Sequence[str], called: Sequence[str] = ()) -> str:
    """The first of some parameters that are not finite, and how many of its entries are not.

    Args:
        model: the model.
        of: what is not finite.
        bad: names of the parameters.
        called: names of modules in the order in which a forward calls them; without it the order of the model counts.
            A parameter whose module is not called counts as used with the module after it.
    """
    named = dict(tensors_of(model, of))
    owners = [name.rpartition(".")[0] for name in named]
    ranks: dict[str, int] = {}
    rank = len(called)
    for name, owner in zip(reversed(named), reversed(owners), strict=True):
        rank = called.index(owner) if owner in called else rank
        ranks[name] = rank
    first = min(bad, key=lambda name: ranks[name])
    tensor = whole(named[first])
    entries = int((~torch.isfinite(values_of(tensor))).sum())
    others = f", and {len(bad) - 1} of the other {len(named) - 1} parameters" if len(bad) > 1 else ""
    return f"{entries:,} of {tensor.numel():,} entries of {first}{others}"


@contextmanager
def calling_order(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of modules in the order in which they are called, as the model runs."""
    found: list[str] = []

    def called(name: str, module: nn.Module, args: object) -> None:
        found.append(name)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(partial(called, name)).remove)
        yield found


@contextmanager
def watching_modules(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of modules whose output is not finite, in the order in which they return, as the model runs.

    A module returns after those inside it, so the first name is the innermost module in which it happened.
    """
    found: list[str] = []

    def look(name: str, module: nn.Module, args: object, output: object) -> None:
        for tensor in tensors_in(output, 8):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                found.append(f"{name or 'the model'} ({type(module).__name__})")
                return

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(partial(look, name)).remove)
        yield found


def tensors_of(model: nn.Module, of: Of) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, or its gradient if it has one, by name; each tensor once.

    A parameter that no longer requires a gradient keeps the one of an earlier step: that is none of this step's.
    """
    for name, parameter in model.named_parameters():
        tensor = parameter if of == "weight" else parameter.grad
        if tensor is not None and (of == "weight" or parameter.requires_grad):
            yield name, tensor.detach()


def is_readable(tensor: Tensor) -> bool:
    """Whether it has entries that are numbers."""
    return tensor.is_floating_point() and not tensor.is_meta


def _norms(tensors: Sequence[Tensor]) -> list[float]:
    """Frobenius norms, with one transfer per device."""
    kinds = {(type(tensor), tensor.layout, tensor.dtype) for tensor in tensors}
    if kinds == {(Tensor, torch.strided, torch.float32)} and len({tensor.device for tensor in tensors}) == 1:
        # The same in fewer calls, which are most of the work for small tensors.
        found: list[float] = torch.stack(torch._foreach_norm(list(tensors))).tolist()
        return found
    norms = (whole(torch.linalg.vector_norm(values_of(tensor), dtype=_wide(tensor))) for tensor in tensors)
    return [float(norm) for norm in to_host([norm.float() for norm in norms])]


def _wide(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype is torch.float64 else torch.float32


def values_of(tensor: Tensor) -> Tensor:
    """The entries of a tensor that are stored."""
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def sampled(tensor: Tensor, entries: int = 1024) -> Tensor:
    """A view of evenly spaced entries, at most so many; the stride is odd, and so does not stay in one column."""
    flat = values_of(tensor.detach()).reshape(-1)
    return flat[:: max(1, len(flat) // entries) | 1][:entries]


def _all_finite(tensor: Tensor) -> bool:
    """Asked only if a norm is not finite, which squares of finite numbers can also cause."""
    return bool(whole(torch.isfinite(values_of(tensor)).all()))


def block_row(metric: str, stack: str | None, layer: int, norm: float) -> LayerValue:
    """One number about the weights of a block."""
    if math.isfinite(norm):
        return LayerValue(metric, SITE, stack, layer, norm, norm, norm)
    return LayerValue(metric, SITE, stack, layer, math.nan, math.nan, math.nan, str(Status.NOT_FINITE))
