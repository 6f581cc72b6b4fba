r"""Second moments of an activation on two correlated Gaussians, their difference without cancellation.

For u, u' of variance v and correlation :math:`1-\delta`: the mean square :math:`\mathbb{E}\varphi(u)^2`, and
:math:`\mathbb{E}\varphi(u)^2 - \mathbb{E}\varphi(u)\varphi(u') = \tfrac12\mathbb{E}(\varphi(u)-\varphi(u'))^2`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_TINY = 1e-8
_NODES = 96
_GATES = {"swiglu": "silu", "geglu": "gelu"}


def kernel_of(mlp: str, variance: float, delta: float) -> tuple[float, float]:
    """Mean square of the activation and half the mean square of a difference. **Exact** to quadrature.

    Args:
        mlp: name of the activation, gated ones included.
        variance: of the inputs.
        delta: one minus their correlation.

    Example:
        >>> kernel_of("linear", 2.0, 0.25)
        (2.0, 0.5)
    """
    if mlp == "linear":
        return variance, variance * delta
    if mlp == "relu":
        return variance / 2, variance / 2 * _relu_apart(delta)
    if mlp in _GATES:
        square, apart = kernel_of(_GATES[mlp], variance, delta)
        # the product with an independent linear branch: products of the second moments
        return square * variance, variance * (square * delta + apart * (1 - delta))
    return _smooth(_ACTIVATIONS[mlp], variance, delta)


def _relu_apart(delta: float) -> float:
    """1 - arc-cosine kernel at 1 - delta; its first term for a tiny delta, where it is all that floats hold."""
    if delta < _TINY:
        return delta
    c = max(-1.0, 1 - delta)
    return 1 - (math.sqrt(delta * (2 - delta)) + c * (math.pi - math.acos(c))) / math.pi


def _smooth(activation: Callable[[Floats], Floats], variance: float, delta: float) -> tuple[float, float]:
    nodes, weights = _hermite()
    common, apart = math.sqrt(variance * (1 - delta / 2)) * nodes, math.sqrt(variance * delta / 2) * nodes
    if delta < _TINY:
        step = 1e-4 * math.sqrt(variance)
        u = math.sqrt(variance) * nodes
        slope = (activation(u + step) - activation(u - step)) / (2 * step)
        return float(weights @ activation(u) ** 2), variance * delta * float(weights @ slope**2)
    first = activation(common[:, None] + apart)
    second = activation(common[:, None] - apart)
    square = float(weights @ (first**2) @ weights)
    return square, 0.5 * float(weights @ ((first - second) ** 2) @ weights)


@lru_cache(maxsize=1)
def _hermite() -> tuple[Any, Any]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    return nodes, weights / weights.sum()


def _erf(x: Floats) -> Floats:
    import torch

    out: Floats = torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy()
    return out


_ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "gelu": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
    "gelu_new": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
}
