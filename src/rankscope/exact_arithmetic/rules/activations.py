r"""Smooth activations: :math:`\phi(b+d) - \phi(b) = d \int_0^1 \phi'(b + t d)\,dt`, without cancellation at any scale.

The integral is computed by Gauss-Legendre quadrature with as many nodes as the size of d requires. If d is below the
last digit of b, it is the derivative at b; if d is large, plain subtraction is used instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.exact_arithmetic.registry import refuse, rule
from rankscope.exact_arithmetic.rounding import moved
from rankscope.exact_arithmetic.tensor import Deviation, joined
from rankscope.exact_arithmetic.terms import Term, exp

aten = torch.ops.aten
Function = Callable[[Tensor], Tensor]

# Number of nodes with an error below 1e-14 for deviations up to this size, if derivatives are of order one.
_NODES = ((2.0**-54, 0), (2.0**-25, 1), (2.0**-10, 2), (2.0**-5, 3), (0.25, 5), (1.0, 8))
# Beyond this, exponentials are below the last digit, even halfway to zero.
_STRAIGHT = 128.0
_LEGENDRE = {count: np.polynomial.legendre.leggauss(count) for count in {nodes for _, nodes in _NODES if nodes}}


def largest(values: Tensor) -> float:
    """Largest absolute entry; 0 if empty."""
    if values.numel() == 0:
        return 0.0
    low, high = torch.aminmax(values)
    return max(-float(low), float(high))


def smooth(x: Deviation, function: Function, derivative: Function, *, straight: float = math.inf) -> Deviation:
    """The deviation of ``function(x)``, for a function whose derivatives are of order one.

    Args:
        x: the argument.
        function: the function.
        derivative: its derivative.
        straight: distance from zero beyond which the function is linear to all digits. Large deviations there that are
            small compared with the base use the derivative instead of a subtraction.
    """
    x = joined(x)
    value = moved(function(x.base), x.base)
    if not x.terms:
        return Deviation(value, (), x.shape)
    scale, d = x.terms[0]
    e = exp(scale)
    size = e * largest(d)
    # Large deviations are subtracted directly; quadrature would need too many nodes.
    if not size < min(1.0, 2.0**-10 * max(1.0, largest(value))):
        change = function(torch.add(x.base, d, alpha=e)) - value
        far = (x.base.abs() > straight) & (e * d.abs() < x.base.abs() / 2)
        return Deviation(value, (Term(0.0, torch.where(far, e * d * derivative(x.base), change)),), x.shape)
    nodes = next(count for limit, count in _NODES if size < limit)
    out = d * _mean_slope(derivative, x.base, d, e, nodes)
    if largest(out) == 0.0 < largest(d):
        # The slope is not zero but underflows; returning zero would mean that tokens are equal.
        refuse("an activation", "it is so far in its flat part that its slope underflows float64")
    return Deviation(value, (Term(scale, out),), x.shape)


def _mean_slope(derivative: Function, b: Tensor, d: Tensor, e: float, nodes: int) -> Tensor:
    if nodes == 0:
        return derivative(b)
    places, weights = _LEGENDRE[nodes]
    slope = torch.zeros_like(d)
    for place, weight in zip(places, weights, strict=True):
        slope = slope.add_(derivative(torch.add(b, d, alpha=e * (place + 1) / 2)), alpha=weight / 2)
    return slope


@rule(aten.gelu)
def gelu(x: Deviation, *, approximate: str = "none") -> Deviation:
    """GELU, exact and with the tanh approximation."""
    slope = _gelu_slope if approximate == "none" else _gelu_tanh_slope
    return smooth(x, lambda t: F.gelu(t, approximate=approximate), slope, straight=_STRAIGHT)


def _gelu_slope(t: Tensor) -> Tensor:
    below: Tensor = torch.special.ndtr(t)
    return below + t * torch.exp(-0.5 * t * t) / math.sqrt(2 * math.pi)


def _gelu_tanh_slope(t: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (t + 0.044715 * t**3)
    inner_slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * t * t)
    return torch.sigmoid(2 * inner) + 0.5 * t * _sech2(inner) * inner_slope


def _sech2(t: Tensor) -> Tensor:
    return 4 * torch.sigmoid(2 * t) * torch.sigmoid(-2 * t)


@rule(aten.silu)
def silu(x: Deviation) -> Deviation:
    """``x sigmoid(x)``."""
    return smooth(x, F.silu, lambda t: torch.sigmoid(t) * (1 + t * torch.sigmoid(-t)), straight=_STRAIGHT)


@rule(aten.tanh)
def tanh(x: Deviation) -> Deviation:
    """Hyperbolic tangent."""
    return _saturating(x, torch.tanh, 1.0)


@rule(aten.sigmoid)
def sigmoid(x: Deviation) -> Deviation:
    """Logistic function, ``(1 + tanh(x/2))/2``."""
    return _saturating(x, torch.sigmoid, 0.5)


def _saturating(x: Deviation, function: Function, half: float) -> Deviation:
    r"""``tanh(half x)`` times ``half``, up to a constant.

    The difference is :math:`\sinh d / (\cosh b \cosh(b + d))`, computed in logarithms because both values may be 1 to
    all digits.
    """
    x = joined(x)
    value = moved(function(x.base), x.base)
    if not x.terms:
        return Deviation(value, (), x.shape)
    scale, b, d = x.terms[0].log_scale, x.base * half, x.terms[0].values * half
    e = exp(scale)
    change = e * d
    far = change.abs() >= 1.0
    # log(sech b sech(b + d)); for large d also log(sinh |d|) = |d| + log(1 - e^{-2|d|}) - log 2.
    log_size = _log_sech(b) + _log_sech(b + change)
    log_size = torch.where(far, log_size + change.abs() + torch.log1p(-torch.exp(-2 * change.abs())), log_size)
    unit = float(log_size.max())
    unit = 0.0 if unit > -20.0 else unit
    # For small d, sinh(e d) / e = d sinh(e d) / (e d), which is d if e underflows.
    near = d * torch.where(change == 0, 1.0, torch.sinh(change.clamp(-1.0, 1.0)) / change)
    sign = torch.where(far, change.sign() / (2 * e) if e > 0 else 0.0, near)
    return Deviation(value, (Term(scale + unit, sign * torch.exp(log_size - unit) * half),), x.shape)


def _log_sech(t: Tensor) -> Tensor:
    return math.log(2.0) - t.abs() - torch.log1p(torch.exp(-2 * t.abs()))


@rule(aten.softplus)
def softplus(x: Deviation, beta: float = 1.0, threshold: float = 20.0) -> Deviation:
    """``log(1 + e^{beta x}) / beta``."""
    return smooth(x, lambda t: F.softplus(t, beta, threshold), lambda t: torch.sigmoid(beta * t))


@rule(aten.log_sigmoid_forward)
def log_sigmoid(x: Deviation) -> tuple[Deviation, Tensor]:
    """Logarithm of the logistic function."""
    return smooth(x, F.logsigmoid, lambda t: torch.sigmoid(-t)), torch.empty(0, dtype=torch.float64)


@rule(aten.erf)
def erf(x: Deviation) -> Deviation:
    """Error function."""
    return smooth(x, torch.erf, lambda t: torch.exp(-t * t) * (2 / math.sqrt(math.pi)))


@rule(aten.sin)
def sin(x: Deviation) -> Deviation:
    """Sine."""
    return smooth(x, torch.sin, torch.cos)


@rule(aten.cos)
def cos(x: Deviation) -> Deviation:
    """Cosine."""
    return smooth(x, torch.cos, lambda t: -torch.sin(t))


@rule(aten.mish)
def mish(x: Deviation) -> Deviation:
    """``x tanh(softplus(x))``."""

    def slope(t: Tensor) -> Tensor:
        inner = F.softplus(t)
        return torch.tanh(inner) + t * _sech2(inner) * torch.sigmoid(t)

    return smooth(x, F.mish, slope, straight=_STRAIGHT)
