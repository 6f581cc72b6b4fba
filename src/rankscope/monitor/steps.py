"""What an optimizer is about to do with the weights: which ones it holds, and whether its epsilon decides its steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from rankscope.linalg.to_host import to_host
from rankscope.models.wrapping import is_distributed

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

    Decided by what the state holds: a mean of gradients and one of their squares, each with its beta, or a momentum.
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
            if state.get("momentum_buffer") is not None and isinstance(momentum, (int, float)) and momentum >= 1.0:
                words = f"keeps {momentum:.4g} of its velocity at each step, so that no gradient is ever forgotten"
                found.append((2.0 * momentum, f"{words} (momentum)"))
    beyond, words = max(found)
    return beyond, words if beyond >= 1.0 else ""


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
