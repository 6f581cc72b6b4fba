"""Activations with kinks, whose differences are computed exactly on either side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rankscope.exact_arithmetic.registry import rule
from rankscope.exact_arithmetic.rules.arithmetic import add, expm1, mul, neg
from rankscope.exact_arithmetic.tensor import Deviation, joined
from rankscope.exact_arithmetic.terms import Term, exp

aten = torch.ops.aten


@rule(aten.relu)
def relu(x: Deviation) -> Deviation:
    """Difference ``max(d, -b)`` if b > 0, ``max(b + d, 0)`` otherwise."""
    return clamp(x, 0.0, None)


@rule(aten.clamp, aten.hardtanh)
def clamp(x: Deviation, low: Any = None, high: Any = None) -> Deviation:
    """Values clamped between two bounds."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        x = x if low is None else maximum(x, low)
        return x if high is None else minimum(x, high)
    x = joined(x)
    value = x.base.clamp(low, high)
    if not x.terms:
        return Deviation(value, (), x.shape)
    scale, d = x.terms[0]
    room_up = torch.inf if high is None else high - x.base
    room_down = -torch.inf if low is None else low - x.base
    # With the distance to either bound in units of the scale, clamp(b+d) - clamp(b) needs no subtraction of values.
    # The base can be as small as the deviation (after attention that concentrates on a sink), so no scale is too small.
    up, down = (_in_units(torch.as_tensor(room, dtype=d.dtype), scale) for room in (room_up, room_down))
    moved = torch.minimum(torch.maximum(d, down), up)
    start = torch.minimum(torch.maximum(torch.zeros_like(x.base), down), up)
    # In these units a base can be infinitely far beyond a bound; it stays clamped, and its deviation is zero.
    return Deviation(value, (Term(scale, torch.where(start.isinf(), 0.0, moved - start)),), x.shape)


def _in_units(room: Tensor, scale: float) -> Tensor:
    """``room`` over ``e^scale``, which may underflow."""
    e = exp(scale)
    return room / e if e > 1e-290 else room.sign() * torch.exp(torch.log(room.abs()) - scale)


@rule(aten.clamp_min)
def clamp_min(x: Deviation, low: Any) -> Deviation:
    """Values not below a bound."""
    return clamp(x, low, None)


@rule(aten.clamp_max)
def clamp_max(x: Deviation, high: Any) -> Deviation:
    """Values not above a bound."""
    return clamp(x, None, high)


@rule(aten.leaky_relu)
def leaky_relu(x: Deviation, negative_slope: float = 0.01) -> Deviation:
    """``negative_slope x + (1 - negative_slope) relu(x)``."""
    return add(mul(x, negative_slope), mul(relu(x), 1 - negative_slope))


@rule(aten.abs)
def absolute(x: Deviation) -> Deviation:
    """``2 relu(x) - x``."""
    return add(mul(relu(x), 2.0), x, alpha=-1)


@rule(aten.elu)
def elu(x: Deviation, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Deviation:
    """``relu(x) + alpha (e^{min(x, 0)} - 1)``, scaled."""
    below = expm1(mul(clamp(x, None, 0.0), input_scale))
    return add(mul(relu(x), scale), mul(below, alpha * scale))


@rule(aten.hardsigmoid)
def hardsigmoid(x: Deviation) -> Deviation:
    """``relu6(x + 3) / 6``."""
    return mul(clamp(add(x, 3.0), 0.0, 6.0), 1 / 6)


@rule(aten.hardswish)
def hardswish(x: Deviation) -> Deviation:
    """``x hardsigmoid(x)``."""
    return mul(x, hardsigmoid(x))


@rule(aten.minimum)
def minimum(a: Any, b: Any) -> Deviation:
    """The smaller of two."""
    return neg(maximum(neg(a) if isinstance(a, Deviation) else -a, neg(b) if isinstance(b, Deviation) else -b))


@rule(aten.maximum)
def maximum(a: Any, b: Any) -> Deviation:
    """``max(a - b, 0) + b``; ``a`` itself if it is nowhere below a plain ``b``."""
    if not isinstance(a, Deviation):
        return maximum(b, a)
    if not isinstance(b, Deviation) and bool((a.to_plain() >= b).all()):
        return a
    return add(relu(add(a, b, alpha=-1)), b)
