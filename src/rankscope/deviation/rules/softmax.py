r"""Softmax, over keys or experts.

With :math:`\pi` the softmax of what all rows have in common and E the rest at scale :math:`\epsilon`, the difference is
:math:`D = \pi (\hat E - z) / (1 + \epsilon z)`, :math:`\hat E = (e^{\epsilon E} - 1)/\epsilon`,
:math:`z = \sum_j \pi_j \hat E_j`. Exact. Parts that are constant along the axis cancel, and are dropped unseen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rankscope.deviation.combining import merged
from rankscope.deviation.registry import rule
from rankscope.deviation.rules.activations import largest
from rankscope.deviation.rules.arithmetic import relative_expm1
from rankscope.deviation.tensor import Deviation
from rankscope.deviation.terms import Term, broadcast, exp, scaled

aten = torch.ops.aten

# Above this exponent P - pi is subtracted outright: it is then no smaller than a hundredth of pi.
_LARGE = 0.5


@rule(aten._softmax, aten.softmax, "_safe_softmax")
def softmax(x: Deviation, dim: int, *options: Any, **named: Any) -> Deviation:
    """Softmax along an axis."""
    axis = dim % x.dim()
    common, terms = _split_off_common(x, axis)
    if common.shape[axis] == 1 < x.shape[axis]:
        common = common.expand(*(x.shape[i] if i == axis else size for i, size in enumerate(common.shape)))
    pi = common.softmax(dim=axis)
    out: list[Term] = []
    if terms:
        scale, E = terms[0]
        if _covers(common, E, axis):
            pi = torch.add(common, E, alpha=exp(scale)).softmax(dim=axis)
        else:
            out = [_departure(common, pi, scale, E, axis)]
    return Deviation(pi, out, x.shape, null_axis=axis, base_sum=1.0)


def _split_off_common(x: Deviation, axis: int) -> tuple[Tensor, tuple[Term, ...]]:
    """What counts along the axis: the part common to rows in plain arithmetic, and one term of the largest shape."""
    base = x.base if x.base.shape[axis] > 1 or x.shape[axis] == 1 else torch.zeros_like(x.base)
    terms = [term for term in x.terms if term.values.shape[axis] > 1 or x.shape[axis] == 1]
    if not terms:
        return base, ()
    full = broadcast(*(term.values.shape for term in terms))
    for term in terms:
        if term.values.shape != full:
            base = base + scaled(term.log_scale, term.values)
    whole = [term for term in terms if term.values.shape == full]
    return base, merged(Deviation(base, whole)).terms


def _covers(common: Tensor, E: Tensor, axis: int) -> bool:
    """Whether the common part already differs wherever the term does, so that nothing is common to rows."""
    return all(own >= size for i, (own, size) in enumerate(zip(common.shape, E.shape, strict=True)) if i != axis)


def _departure(common: Tensor, pi: Tensor, scale: float, E: Tensor, axis: int) -> Term:
    e = exp(scale)
    size = e * largest(E)
    if not size < _LARGE:
        return Term(0.0, torch.add(common, E, alpha=e).softmax(dim=axis) - pi)
    hat = E if size < 2.0**-54 else relative_expm1(E, e)
    z = (pi * hat).sum(dim=axis, keepdim=True)
    D = (hat - z).mul_(pi)
    return Term(scale, D if size < 2.0**-54 else D.div_(1 + e * z))
