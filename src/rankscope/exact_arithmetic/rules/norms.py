r"""LayerNorm and RMSNorm.

Let u be the centred base, v the centred deviation, :math:`a = \overline{u^2} + \epsilon` and
:math:`\delta = 2\overline{uv} + e^s\overline{v^2}`. Then the new inverse scale minus the old one is
:math:`-\delta / (A B (A + B))`, with :math:`A = \sqrt a` and :math:`B = \sqrt{a + e^s \delta}`. Exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rankscope.exact_arithmetic.registry import refuse, rule
from rankscope.exact_arithmetic.tensor import Deviation, joined
from rankscope.exact_arithmetic.terms import Term, exp

aten = torch.ops.aten


@rule(aten.native_layer_norm)
def layer_norm(
    x: Deviation, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Deviation, Tensor, Tensor]:
    """LayerNorm over the last axis."""
    if len(shape) != 1:
        refuse("aten.native_layer_norm", f"it normalises over {len(shape)} axes, and the rule knows one")
    x = joined(x)
    u = x.base.expand(*x.base.shape[:-1], x.shape[-1])
    u = u - u.mean(dim=-1, keepdim=True)
    centred = tuple(Term(s, v - v.mean(dim=-1, keepdim=True)) for s, v in x.terms)
    empty = torch.empty(0, dtype=torch.float64, device=x.device)
    return _normalised(u, centred, x.shape, weight, bias, eps), empty, empty


@rule("_fused_rms_norm")
def rms_norm(x: Deviation, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Deviation, Tensor]:
    """RMSNorm over the last axis."""
    x = joined(x)
    eps = torch.finfo(torch.float64).eps if eps is None else eps
    u = x.base.expand(*x.base.shape[:-1], x.shape[-1])
    return _normalised(u, x.terms, x.shape, weight, None, eps), torch.empty(0, dtype=torch.float64, device=x.device)


def _normalised(
    u: Tensor, terms: Sequence[Term], shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Deviation:
    A = (u.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    gain: Any = 1.0 if weight is None else weight
    value = u / A * gain
    out = [Term(s, _difference(u, v, A, exp(s), gain)) for s, v in terms]
    return Deviation(value if bias is None else value + bias, out, shape)


def _difference(u: Tensor, v: Tensor, A: Tensor, e: float, gain: Any) -> Tensor:
    dim = u.shape[-1]
    delta = 2.0 / dim * _inner(u, v)
    # (u + e v) / B - u / A = e (v / B - u delta / (A B (A + B))). Below e = 1e-30, B equals A to all digits.
    if e > 1e-30 or not bool((A > 0).all()):
        squares = torch.linalg.vector_norm(v, dim=-1, keepdim=True).square() / dim
        delta = torch.add(delta, squares, alpha=e)
        B = (A.square() + e * delta).sqrt()
        out = (v / B).mul_(gain)
        return out.addcmul_(u * gain, -delta / (A * B * (A + B)))
    out = torch.mul(v, gain / A)
    return out.addcmul_(u * gain, -delta / (2 * A**3))


def _inner(u: Tensor, v: Tensor) -> Tensor:
    """Sum over the last axis of ``u v``; a matrix-vector product if u is one row."""
    if u.numel() == u.shape[-1]:
        return (v @ u.reshape(-1, 1)).reshape(*v.shape[:-1], 1)
    return (u * v).sum(dim=-1, keepdim=True)
