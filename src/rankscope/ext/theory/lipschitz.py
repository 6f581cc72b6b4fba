r"""Certified Lipschitz constants of an MLP, for the composite residual.

For :math:`f(x) = \phi(xW_1 + b_1)W_2 + b_2` with :math:`|\phi'| \le \ell`, applied token by token,
:math:`|f(X) - 1f(x)^T| \le \ell\,|X - 1x^T|\,|W_1||W_2|`, so that the composite residual grows by no more than
:math:`\ell\,\||W_1||W_2|\|_{1,\infty}`. A gated MLP :math:`(\phi(xW_g)\odot xW_u)W_d` is Lipschitz only if its input
is bounded, which the norm before it guarantees: :math:`\|x\|_2 \le \rho`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.errors import InputError
from rankscope.ext.theory.operator_norms import composite_norm
from rankscope.linalg.precision import as_float64

_EPS = torch.finfo(torch.float64).eps

# The largest |phi'|, where phi'' is 0 (for GELU at sqrt 2), rounded up in the last digit.
SLOPES: Mapping[str, float] = {
    "linear": 1.0,
    "relu": 1.0,
    "tanh": 1.0,
    "gelu": 1.12890415,
    "gelu_new": 1.12899307,
    "gelu_fast": 1.12899307,
    "gelu_pytorch_tanh": 1.12899307,
    "quick_gelu": 1.09983933,
    "silu": 1.09983933,
    "swish": 1.09983933,
}
# |phi(x)| <= |x| for each of them, which bounds the gate.


@dataclass(frozen=True)
class LipschitzConstants:
    """A certified upper bound, ``composite``, on the factor by which the composite residual grows.

    ``radius`` is the largest norm of a token for which it holds; None if it holds for all.
    """

    composite: float
    radius: float | None = None


def mlp_constants(
    W_in: Float[Tensor, "dim width"], W_out: Float[Tensor, "width dim"], activation: str
) -> LipschitzConstants:
    r"""Constant of :math:`\phi(xW_1)W_2`. **Bound**.

    Raises:
        InputError: the slope of the activation is not known.

    Example:
        >>> eye = torch.eye(3, dtype=torch.float64)
        >>> round(mlp_constants(2 * eye, 3 * eye, "relu").composite, 9)
        6.0
    """
    slope = _slope(activation)
    W_in, W_out = as_float64(W_in.detach()), as_float64(W_out.detach())
    entries = composite_norm(W_in.abs() @ W_out.abs()) * (1 + 4 * W_in.shape[1] * _EPS)
    return LipschitzConstants(slope * float(entries))


def gated_constants(
    W_gate: Float[Tensor, "dim width"],
    W_up: Float[Tensor, "dim width"],
    W_down: Float[Tensor, "width dim"],
    activation: str,
    radius: float,
) -> LipschitzConstants:
    r"""Constant of :math:`(\phi(xW_g)\odot xW_u)W_d` on :math:`\|x\|_2 \le` ``radius``. **Bound**.

    Channel k of the gate is at most :math:`\rho\|W_{g,k}\|_2` in size, since :math:`|\phi(t)| \le |t|`, and that of the
    other factor at most :math:`\rho\|W_{u,k}\|_2`.

    Example:
        >>> eye = torch.eye(1, dtype=torch.float64)
        >>> round(gated_constants(eye, eye, eye, "relu", radius=2.0).composite, 9)
        4.0
    """
    slope = _slope(activation)
    W_gate, W_up, W_down = (as_float64(W.detach()) for W in (W_gate, W_up, W_down))
    gate, up = (radius * torch.linalg.vector_norm(W, dim=0) for W in (W_gate, W_up))
    entries = (W_up.abs() * gate + slope * W_gate.abs() * up) @ W_down.abs()
    return LipschitzConstants(float(composite_norm(entries)) * (1 + 4 * W_up.shape[1] * _EPS), radius)


def _slope(activation: str) -> float:
    if activation not in SLOPES:
        raise InputError(f"The slope of the activation {activation!r} is not known. Known: {', '.join(SLOPES)}.")
    return SLOPES[activation]
