"""Small measures of tensors that several causes use."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankscope.linalg.rounding import differs
from rankscope.models.loading.devices import seed_generators

_OUTPUTS = ("logits", "last_hidden_state", "prediction_logits", "logits_per_image", "image_embeds")
_ROUNDINGS = {torch.float64: 256, torch.float32: 256}
"""Roundings of the largest entry that count as equal; 8 in half precision."""

PROBABILITY = 1e-3
"""Distance of a sum from one up to which its terms are probabilities; float16 reaches a half of it."""


def main_output(value: Any) -> Tensor | None:
    """The tensor that a model returns first: logits, states, or the first floating one."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    for name in _OUTPUTS:
        output = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if isinstance(output, Tensor) and output.is_floating_point():
            return output
    leaves = pytree.tree_leaves(value)
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
    inner = vars(value).values() if hasattr(value, "__dict__") else ()
    return next((leaf for leaf in inner if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)


def apart(states: Tensor, axis: int = 0) -> float:
    """How much the entries along an axis differ from their mean, relative to their size; 0 if all are zero."""
    flat = states.detach().double().movedim(axis, 0).reshape(states.shape[axis], -1)
    size = float(flat.norm())
    return float((flat - flat.mean(0)).norm()) / size if size > 0 else 0.0


def tokens_apart(states: Tensor, keep: Tensor | None = None) -> float:
    """Mean relative residual of the tokens of each sequence, of states ``batch tokens dim``."""
    distances = []
    for row, one in enumerate(states.detach().double()):
        kept = one if keep is None else one[keep[row].to(one.device)]
        if len(kept) > 1:
            distances.append(apart(kept))
    return sum(distances) / len(distances) if distances else float("nan")


def changed_entries(before: Tensor, after: Tensor) -> Tensor | None:
    """Where two tensors differ by more than rounding; None if they cannot be compared."""
    if before.shape != after.shape or before.numel() == 0:
        return None
    both = torch.isfinite(before) & torch.isfinite(after)
    return differs(before, after, _ROUNDINGS.get(before.dtype, 8)) if bool(both.any()) else None


def change_between(before: Tensor, after: Tensor) -> float:
    """Size of the difference relative to the size of the first."""
    size = float(before.detach().double().norm())
    return float((before.detach().double() - after.detach().double()).norm()) / size if size > 0 else 0.0


def few(names: Sequence[str]) -> str:
    """The first three of some names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def shuffled(parameter: Tensor, seed: int) -> Tensor:
    """The same entries in another order: another draw from the same distribution."""
    order = torch.randperm(parameter.numel(), generator=torch.Generator().manual_seed(seed))
    return parameter.detach().flatten()[order.to(parameter.device)].view_as(parameter)


def redrawn(modules: list[tuple[str, nn.Module]]) -> dict[str, Tensor]:
    """Newly drawn parameters: as a module draws them itself, and small numbers for matrices that none of them draws."""
    replaced: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        seed_generators(0)
        for name, module in modules:
            again = copy.deepcopy(module)
            drawn: set[Tensor] = set()
            for part in again.modules():
                reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
                if callable(reset):
                    reset()
                    drawn |= set(part.parameters())
            for inner, parameter in again.named_parameters():
                if parameter not in drawn and parameter.ndim > 1:
                    parameter.normal_(0.0, 0.02)
                replaced[f"{name}.{inner}" if name else inner] = parameter.detach()
    return replaced


def norm_gains(module: nn.Module) -> list[nn.Parameter]:
    """The vectors of the modules that hold nothing but one or two vectors, as norms do, and are not zero."""
    found: list[nn.Parameter] = []
    for part in module.modules():
        own = list(part.parameters(recurse=False))
        if 0 < len(own) <= 2 and next(part.children(), None) is None and all(p.ndim == 1 and len(p) > 1 for p in own):
            found += [one for one in own if bool(one.detach().any())]
    return found


def is_trained(module: nn.Module) -> bool:
    """Whether the gains of its norms, which all begin as one number, differ; False if it has none."""
    return any(bool((one.detach() != one.detach()[0]).any()) for one in norm_gains(module))


def cloned(blocks: Sequence[nn.Module]) -> list[int]:
    """Blocks whose weights equal those of the first one, entry by entry, in memory of their own."""
    if len(blocks) < 2:
        return []
    first = dict(blocks[0].named_parameters())
    matrices = [name for name, p in first.items() if p.ndim >= 2]
    numbers = []
    for number, block in enumerate(blocks[1:], start=1):
        own = dict(block.named_parameters())
        if (
            matrices
            and own.keys() == first.keys()
            and all(own[n] is not first[n] and own[n].shape == first[n].shape for n in matrices)
            and all(torch.equal(own[n].detach(), first[n].detach()) for n in matrices)
            and all(bool(first[n].detach().any()) for n in matrices)
        ):
            numbers.append(number)
    return numbers


def are_probabilities(states: Tensor, axis: int = -1) -> bool:
    """Whether numbers are not negative and sum to one along an axis."""
    return bool((states >= 0).all()) and float((states.double().sum(axis) - 1).abs().max()) < PROBABILITY


def spread_out(result: Tensor) -> Tensor:
    """Outputs that differ, of the kind that a model returns: probabilities, numbers between 0 and 1, or any."""
    drawn = torch.randn(result.shape, generator=torch.Generator().manual_seed(0)).to(result)
    if result.ndim > 1 and are_probabilities(result):
        return drawn.softmax(-1)
    if bool(((result >= 0) & (result <= 1)).all()) and bool(result.any()):
        return drawn.sigmoid()
    size = float(result.double().square().mean().sqrt())
    return result + drawn * (size if 1 < size < math.inf else 1.0)


def filled_ends(ids: Tensor) -> Tensor | None:
    """Where one id fills the ends of sequences, in most of them two tokens or more and never all; None for none."""
    last = ids[:, -1].mode().values
    filling = (ids == last).flip(1).long().cumprod(1).flip(1).bool()
    lengths = filling.sum(1)
    most = int((lengths >= 2).sum()) * 2 > len(ids) and int(lengths.max()) < ids.shape[1]
    return filling if most and len(torch.unique(lengths)) > 1 else None
