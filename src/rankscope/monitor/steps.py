"""What an optimizer is about to do with the weights: which ones it holds, and whether its epsilon decides its steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankscope.linalg.to_host import to_host
from rankscope.models.wrapping import is_distributed

ROUNDED = 4.0
"""Times the largest ratio that a mean of gradients and the root of one of their squares can have; room for rounding."""
DECAYED = 0.7
"""Cosine between the mean of gradients of a matrix and its weights, from which on steps shrink it and little else."""
REVERSED = 8.0
"""Times as many steps over which gradients are averaged, as those over which their squares are. Equal numbers of steps
are usual, and twice as many occur; the usual settings in the wrong order give 10 to 100."""
_SAMPLED = 256
_MOST = 16
"""Parameters of an optimizer whose second moments are sampled."""


def with_hooks(optimizer: object) -> Optimizer | None:
    """The torch optimizer under the wrappers of accelerate and Lightning, whose own hooks are called; None if none."""
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), Optimizer) and "_optimizer_step_pre_hooks" not in vars(inner):
        inner = inner.optimizer  # type: ignore[attr-defined]
    return inner if isinstance(inner, Optimizer) and hasattr(inner, "_optimizer_step_pre_hooks") else None


def settings_of(optimizers: Sequence[Optimizer]) -> dict[str, float]:
    """The numbers of the first group of the first optimizer, besides learning rates."""
    groups = [group for one in optimizers[:1] for group in one.param_groups[:1]]
    found: dict[str, float] = {}
    for name in ("weight_decay", "eps", "momentum", "dampening", "alpha", "betas", "maximize", "amsgrad"):
        for group in groups:
            values = group.get(name, ())
            for number, value in enumerate(values if isinstance(values, tuple) else (values,)):
                if isinstance(value, (int, float)):
                    found[f"{name}[{number}]" if isinstance(values, tuple) else name] = float(value)
    return found


def contradiction(optimizers: Sequence[Optimizer]) -> tuple[float, str]:
    """How far beyond what is usual the worst group of settings is, 1 at the limit, and that in words if it is beyond.

    Decided by what the state holds: a mean of gradients and one of their squares, each with its beta, or a momentum. A
    mean of gradients that no gradients can have, given that of their squares, is impossible (the squares were rounded
    to zero, or are another parameter's); one along the weights, a decay that was added to the gradients.
    """
    found = [(0.0, "")]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            states = [optimizer.state.get(parameter, {}) for parameter in group["params"]]
            state: Mapping[str, Any] = next(filter(None, states), {})
            betas, momentum = group.get("betas", ()), group.get("momentum", 0.0)
            if {"exp_avg", "exp_avg_sq"} <= state.keys() and len(betas) == 2 and max(betas) < 1.0:
                first, second = (1.0 / (1.0 - float(beta)) for beta in betas)
                words = f"averages gradients over {first:,.0f} steps and their squares over {second:,.0f}"
                settings = f"(betas {float(betas[0]):.4g} and {float(betas[1]):.4g})"
                found.append((first / second / REVERSED, f"{words}; the usual order is the other way round {settings}"))
                found += _of_means(optimizer, group)
            if state.get("momentum_buffer") is not None and isinstance(momentum, (int, float)) and momentum >= 1.0:
                words = f"keeps {momentum:.4g} of its velocity at each step, so that no gradient is ever forgotten"
                found.append((2.0 * momentum, f"{words} (momentum)"))
    beyond, words = max(found)
    return beyond, words if beyond >= 1.0 else ""


def _of_means(optimizer: Optimizer, group: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    """The same for what the means of a group hold: the median of some matrices, by a sample of each."""
    held: list[tuple[Tensor, Any, Any]] = []
    for one in group["params"]:
        state: Mapping[str, Any] = optimizer.state.get(one, {})
        parts = (one.detach(), state.get("exp_avg"), state.get("exp_avg_sq"))
        plain = all(type(part) is Tensor and part.is_floating_point() and part.shape == one.shape for part in parts)
        if one.ndim > 1 and one.numel() >= _SAMPLED and plain:
            held.append(parts)
    held = held[:: max(1, len(held) // _MOST)]
    if not held:
        return
    samples = [sample.double() for sample in to_host([_sample(part) for parts in held for part in parts])]
    first, second = (float(beta) for beta in group["betas"])
    if first**2 < second:
        # of sums over any gradients, by Cauchy and Schwarz
        most = (1.0 - first) / math.sqrt((1.0 - second) * (1.0 - first**2 / second))
        roots = [squares.sqrt() + float(group.get("eps", 0.0)) for squares in samples[2::3]]
        means = zip(samples[1::3], roots, strict=True)
        largest = max(float((mean.abs() / root).nan_to_num(0.0, 0.0).max()) for mean, root in means)
        words = f"holds a mean of gradients that is {largest:.3g} times the root of the mean of their squares"
        words = f"{words}, and no gradients give more than {most:.2g}"
        yield largest / most / ROUNDED, words
    along = median(
        float(torch.nn.functional.cosine_similarity(weight, mean, dim=0))
        for weight, mean in zip(samples[::3], samples[1::3], strict=True)
    )
    words = f"takes steps along the weights themselves (cosine {along:.2g})"
    yield along / DECAYED, f"{words}: a decay that is added to gradients outweighs them (weight_decay)"


def held_by(model: nn.Module, optimizers: Sequence[Optimizer]) -> frozenset[str]:
    """Names of the parameters that some optimizer is to change, at a learning rate above zero."""
    groups = [group for one in optimizers for group in one.param_groups if float(group.get("lr", 1.0)) > 0.0]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in held)


def epsilon_ratio(optimizers: Sequence[Optimizer]) -> float:
    """Epsilon over the root of the second moment that it is added to, the median over matrices; NaN if there is none.

    Far above 1, steps are no longer of the size of the learning rate. **Estimate** from a sample of the entries whose
    second moment is not zero. Adam and its kin, RMSprop and Adagrad have one.
    """
    moments = [one for optimizer in optimizers for one in _moments(optimizer)]
    places = [round(number * (len(moments) - 1) / max(1, _MOST - 1)) for number in range(_MOST)] if moments else []
    chosen = [moments[place] for place in dict.fromkeys(places)]
    found = []
    for (_, epsilon, correction), sample in zip(chosen, to_host([_sample(one) for one, _, _ in chosen]), strict=True):
        known = sample[sample > 0].double()
        if len(known):
            found.append(epsilon / math.sqrt(float(known.median()) / correction))
    return median(found) if found else math.nan


def _moments(optimizer: Optimizer) -> Iterator[tuple[Tensor, float, float]]:
    """Second moment, epsilon and the factor by which the moment is biased, of every matrix."""
    for group in optimizer.param_groups:
        epsilon: Any = group.get("eps")
        for parameter in group["params"] if isinstance(epsilon, float) else ():
            state: Mapping[str, Any] = optimizer.state.get(parameter, {})
            known = [state[name] for name in ("exp_avg_sq", "square_avg", "sum") if name in state]
            if parameter.ndim > 1 and known and isinstance(known[0], Tensor) and not is_distributed(known[0]):
                biased = 1.0 - group["betas"][1] ** float(state["step"]) if "exp_avg_sq" in state else 1.0
                if known[0].shape == parameter.shape and biased > 0.0:
                    yield known[0], float(epsilon), biased


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, len(flat) // _SAMPLED)][:_SAMPLED].clone()
