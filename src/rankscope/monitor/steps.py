"""The optimizers of a run: the torch optimizer under wrappers, its settings, and the parameters that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer


def with_hooks(optimizer: object) -> Optimizer | None:
    """The torch optimizer under the wrappers of accelerate and Lightning, whose own hooks are called; None if none."""
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), Optimizer) and "_optimizer_step_pre_hooks" not in vars(inner):
        inner = inner.optimizer  # type: ignore[attr-defined]
    return inner if isinstance(inner, Optimizer) and hasattr(inner, "_optimizer_step_pre_hooks") else None


def settings_of(group: dict[str, Any]) -> dict[str, float]:
    """The numbers of a group of an optimizer, by name; betas are ``betas[0]`` and ``betas[1]``."""
    found: dict[str, float] = {}
    for name in ("lr", "weight_decay", "eps", "momentum", "dampening", "alpha", "betas", "maximize", "amsgrad"):
        value = group.get(name)
        for number, one in enumerate(value if isinstance(value, tuple) else (value,)):
            if one is not None and hasattr(one, "__float__"):
                found[f"{name}[{number}]" if isinstance(value, tuple) else name] = float(one)
    return found


def held_by(model: nn.Module, optimizers: Sequence[Optimizer]) -> frozenset[str]:
    """Names of the parameters that some optimizer is to change, at a learning rate above zero."""
    groups = [group for one in optimizers for group in one.param_groups if float(group.get("lr", 1.0)) > 0.0]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in held)


def predicted(
    optimizer: Optimizer, group: dict[str, Any], weight: Tensor, gradient: Tensor, state: dict[str, Any]
) -> Tensor | None:
    """The weight after a step of ``SGD``, ``Adam`` or ``AdamW``, by their formulas; None for any other optimizer.

    Args:
        optimizer: that makes the step.
        group: its settings.
        weight: entries of a parameter, before the step.
        gradient: the same entries of its gradient.
        state: the same entries of what the optimizer held, before the step; empty before the first one.

    Example:
        >>> import torch
        >>> weight = torch.ones(2, dtype=torch.float64).requires_grad_()
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> predicted(optimizer, optimizer.param_groups[0], weight.detach(), 2.0 * torch.ones_like(weight), {}).tolist()
        [0.8, 0.8]
    """
    # A loss scale that a fused step takes out is not in the gradient.
    if type(optimizer) not in (SGD, Adam, AdamW) or group.get("fused") or group.get("amsgrad"):
        return None
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    gradient = -gradient if group.get("maximize") else gradient
    if isinstance(optimizer, SGD):
        gradient, momentum = gradient + decay * weight, float(group["momentum"])
        if momentum:
            held = state.get("momentum_buffer")
            held = gradient if held is None else momentum * held + (1.0 - float(group["dampening"])) * gradient
            gradient = gradient + momentum * held if group["nesterov"] else held
        return weight - rate * gradient
    if type(optimizer) is AdamW or group.get("decoupled_weight_decay"):
        weight = weight * (1.0 - rate * decay)
    else:
        gradient = gradient + decay * weight
    (first, second), count = map(float, group["betas"]), float(state.get("step", 0.0)) + 1.0
    mean = first * state.get("exp_avg", 0.0) + (1.0 - first) * gradient
    square = second * state.get("exp_avg_sq", 0.0) + (1.0 - second) * gradient.square()
    root = (square / (1.0 - second**count)).sqrt() + float(group["eps"])
    after: Tensor = weight - rate / (1.0 - first**count) * mean / root
    return after
