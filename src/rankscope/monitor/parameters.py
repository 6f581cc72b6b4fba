"""Norms of weights and gradients block by block, and which of them are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from rankscope._types import Status
from rankscope.linalg.to_host import to_host
from rankscope.models.view import ModelView
from rankscope.models.wrapping import is_distributed, whole
from rankscope.monitor.readings import LayerValue, fact
from rankscope.stream.frames import tensors_in

Of = Literal["weight", "gradient"]
SITE = "block.weights"
_DEEPEST = 8
"""Levels of tuples and mappings of a module's output that are looked into."""
_SAMPLED = 1024
MOVED = 0.05
"""Share of the entries of the blocks' matrices below which weights count as still."""
EARLY_LOOKS = 8
"""Looks at the weights before a turn is reported: small initial weights turn fast in the first steps."""
"""Entries of a parameter that are compared with those of the last reading."""


@dataclass(frozen=True)
class ParameterNorms:
    """What one look at all weights, or all gradients, found.

    Attributes:
        rows: the norm over each block.
        total: the norm over the whole model.
        number: how many parameters were looked at.
        not_finite: number of parameters with a NaN or an infinity.
        words: the first of them in the order of the model, and how many of its entries are not finite.
    """

    rows: tuple[LayerValue, ...]
    total: float
    number: int
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
    for name, home in _homes(view, norms).items():
        squares[home] = squares.get(home, 0.0) + norms[name] ** 2
    rows = [_row(f"{of}_norm", stack, layer, math.sqrt(square)) for (stack, layer), square in squares.items()]
    total = math.sqrt(math.fsum(norm * norm for norm in norms.values()))
    return ParameterNorms(tuple(rows), total, len(norms), len(bad), _described(named, bad) if bad else "")


class WeightMotion:
    """How far the weights of each block moved since the last look, by a sample of their entries."""

    def __init__(self) -> None:
        self._step = 0
        self._still = 0
        self._number = 0
        self._samples: dict[str, Tensor] = {}
        self._matrices: set[str] = set()
        self._largest: dict[tuple[str | None, int], float] = {}

    def take(self, view: ModelView, step: int) -> tuple[LayerValue, ...]:
        r"""Per step, :math:`\|W_t - W_s\|_F / ((t - s) \|W_t\|_F)` over the sampled entries of a block.

        **Estimate.** Nothing at the first look, of parameters whose shape changed, and of a model whose weights are
        sharded over ranks: each rank would sample other entries.
        """
        named = {name: tensor for name, tensor in _tensors(view.model, "weight") if _is_readable(tensor)}
        if any(map(is_distributed, named.values())):
            return ()
        homes = _homes(view, named)
        now = dict(zip(named, to_host([_sample(tensor) for tensor in named.values()]), strict=True))
        now = {name: sample.double() for name, sample in now.items()}
        self._matrices = {name for name, tensor in named.items() if tensor.dim() > 1}
        before, steps = self._samples, step - self._step
        self._samples, self._step = now, step
        moved: dict[tuple[str | None, int], list[float]] = {}
        for name, home in homes.items():
            if name in before and before[name].shape == now[name].shape:
                sums = moved.setdefault(home, [0.0, 0.0])
                sums[0] += float((now[name] - before[name]).square().sum())
                sums[1] += float(now[name].square().sum())
        if steps <= 0:
            return ()
        rows = [
            _row("weight_motion", stack, layer, math.sqrt(change / size) / steps)
            for (stack, layer), (change, size) in moved.items()
            if size > 0.0
        ]
        return (*rows, *self._turns(homes, before, now, steps), *self._stillness(view, homes, before, now, steps))

    def _turns(
        self,
        homes: Mapping[str, tuple[str | None, int]],
        before: Mapping[str, Tensor],
        now: Mapping[str, Tensor],
        steps: int,
    ) -> Iterator[LayerValue]:
        """One minus the cosine between the matrices of a block now and at the last look, and the largest so far.

        Near 0 while a model trains, and about 1 if the block was initialised again or another one was loaded.
        """
        self._number += 1
        for home in dict.fromkeys(homes.values()):
            own = [name for name in homes if homes[name] == home and name in self._matrices and name in before]
            own = [name for name in own if before[name].shape == now[name].shape]
            if not own:
                continue
            old, new = (torch.cat([samples[name] for name in own]) for samples in (before, now))
            size = float(old.norm() * new.norm())
            turn = 1.0 - float(old @ new) / size if size > 0.0 else math.nan
            largest = self._largest.get(home, math.nan)
            if math.isfinite(largest) and self._number > EARLY_LOOKS:
                yield _row("weight_turn_before", *home, largest)
                yield _row("weight_turn", *home, turn)
            self._largest[home] = turn if math.isnan(largest) else max(turn, largest)

    def _stillness(
        self,
        view: ModelView,
        homes: Mapping[str, tuple[str | None, int]],
        before: Mapping[str, Tensor],
        now: Mapping[str, Tensor],
        steps: int,
    ) -> Iterator[LayerValue]:
        """Share of the entries of matrices that learn which moved at all, and for how many steps hardly any did."""
        learned = {name for name, parameter in view.model.named_parameters() if parameter.requires_grad}
        known = [name for name in learned if name in now and name in before and before[name].shape == now[name].shape]
        matrices = [name for name in known if name in self._matrices and name in homes] or known
        if not known:
            return
        count = sum(now[name].numel() for name in matrices)
        share = sum(int((now[name] != before[name]).sum()) for name in matrices) / max(1, count)
        self._still = self._still + steps if share < MOVED else 0
        yield fact("weights_moved", "weights", share)
        yield fact("still_steps", "weights", float(self._still))


def _sample(tensor: Tensor) -> Tensor:
    flat = _values(tensor).flatten()
    return flat[:: max(1, len(flat) // _SAMPLED)][:_SAMPLED].clone()


def _homes(view: ModelView, names: Iterable[str]) -> dict[str, tuple[str | None, int]]:
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


def _described(named: Mapping[str, Tensor], bad: Sequence[str]) -> str:
    tensor = whole(named[bad[0]])
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
    norms = (whole(torch.linalg.vector_norm(_values(tensor), dtype=_wide(tensor))) for tensor in tensors)
    return [float(norm) for norm in to_host([norm.float() for norm in norms])]


def _wide(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype is torch.float64 else torch.float32


def _values(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _all_finite(tensor: Tensor) -> bool:
    """Asked only if a norm is not finite, which squares of finite numbers can also cause."""
    return bool(whole(torch.isfinite(_values(tensor)).all()))


def _row(metric: str, stack: str | None, layer: int, norm: float) -> LayerValue:
    if math.isfinite(norm):
        return LayerValue(metric, SITE, stack, layer, norm, norm, norm)
    return LayerValue(metric, SITE, stack, layer, math.nan, math.nan, math.nan, str(Status.NOT_FINITE))
