r"""Softmax, over keys or experts.

Let :math:`\pi` be the softmax of what rows have in common and E the rest, at scale :math:`\epsilon`. The difference is
:math:`D_{ij} = \pi_j (\hat E_{ij} - z_i) / (1 + \epsilon z_i)`, :math:`\hat E = (e^{\epsilon E} - 1)/\epsilon`,
:math:`z_i = \sum_j \pi_j \hat E_{ij}`. Exact. Parts that are constant along the axis cancel, and are dropped.

A saturated softmax, in which one weight is nearly 1 and the others are tiny, needs two more steps. E may be shifted by
one number per row: it is shifted to zero at the largest weight (the pivot), so that the tiny ones are never added to a
number near 1. And D at the pivot is minus the sum of D elsewhere, not a difference of two numbers near 1. The tiny
weights get a log-scale, so that they do not underflow.

If rows differ by mask or position, differences are computed in steps: first those between the rows at the common point,
then those of each scale, largest first, so that a later product can cancel one without losing the next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rankscope.exact_arithmetic.registry import rule
from rankscope.exact_arithmetic.rounding import are_moved, fingerprint, moved, summed_along
from rankscope.exact_arithmetic.rules.activations import largest
from rankscope.exact_arithmetic.rules.arithmetic import relative_expm1
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.exact_arithmetic.terms import APART, Term, added, broadcast, by_scale, exp, normalised

aten = torch.ops.aten

# Weights whose logarithms differ by more than this are subtracted directly: a third of the larger one remains.
_LARGE = 0.5
# Scores below this hide a key: the lowest number of every float format is below it, whatever is added to it.
_HIDDEN = -6e4
# Weights above e^-20 need no separate scale.
_TINY = -20.0


@rule(aten._softmax, aten.softmax, "_safe_softmax")
def softmax(x: Deviation, dim: int, *options: Any, **named: Any) -> Deviation:
    """Softmax along an axis."""
    axis = dim % x.dim()
    common, terms = _split_off_common(x, axis)
    if common.shape[axis] == 1 < x.shape[axis]:
        common = common.expand(*(x.shape[i] if i == axis else size for i, size in enumerate(common.shape)))
    # A row whose keys are all hidden by one huge number (that of a padded token) is a row of equal scores. Next to that
    # number, the scores of other rows would lose every digit.
    top = common.amax(dim=axis, keepdim=True)
    hidden = (top < _HIDDEN) & top.isfinite()
    if hidden.any():
        common = torch.where(hidden, common - top, common)
    pi, out, common, terms = _at_order_one(common, terms, axis, hidden)
    # Telescoping sum: softmax(total) - pi = sum over scales of softmax(common + e^s E) - softmax(common).
    for scale, E in terms:
        total = added(common, E, scale)
        out += _departure(common, scale, E, total, axis)
        common = total
    return Deviation(pi, out, x.shape, null_axis=axis, base_sum=1.0)


def _split_off_common(x: Deviation, axis: int) -> tuple[Tensor, list[Term]]:
    """The common part of the rows in plain arithmetic, and the terms, largest scale first.

    Parts that are constant along the axis are dropped: softmax ignores them. Terms that do not differ between rows
    belong to the common part; if that already differs between rows, only those whose scale is not small (a mask) do.
    """
    base = x.base if x.base.shape[axis] > 1 or x.shape[axis] == 1 else torch.zeros_like(x.base)
    terms = [term for term in x.terms if term.values.shape[axis] > 1 or x.shape[axis] == 1]
    if not terms:
        return base, []
    full = broadcast(*(term.values.shape for term in terms))
    # First the terms whose scale is not small (a mask). Small ones follow only if the common part is still one row:
    # added to rows that differ, they would be rounded.
    for at_most in (-APART, -torch.inf):
        for term in [term for term in terms if term.values.shape != full and term.log_scale > at_most]:
            base = added(base, term.values, term.log_scale)
            terms = [kept for kept in terms if kept is not term]
        if _rows_differ(base, axis):
            break
    return base, by_scale(terms)


def _rows_differ(common: Tensor, axis: int) -> bool:
    return axis == common.dim() - 1 > 0 and common.shape[-2] > 1


def _at_order_one(
    common: Tensor, terms: list[Term], axis: int, hidden: Tensor
) -> tuple[Tensor, list[Term], Tensor, list[Term]]:
    """A row of weights near all rows, the deviations of the rows from it, their scores so far, and the remaining terms.

    The row includes everything that is not small. If all rows concentrate on one weight, it does too, and their
    differences are small numbers rather than differences of large ones. A ``hidden`` row is never chosen.
    """
    count = sum(not exp(scale) * largest(E) < _LARGE for scale, E in terms)
    large, small = terms[:count], terms[count:]
    total, E = common, torch.zeros_like(common)
    for term in large:
        total, E = added(total, term.values, term.log_scale), added(E, term.values, term.log_scale)
    if not _rows_differ(common, axis):
        # One common row: move it by the mean of the large deviations, so that all rows are near it.
        rows = [i for i, size in enumerate(E.shape) if i != axis and common.shape[i] == 1 < size]
        if not rows:
            return total.softmax(dim=axis), [], total, small
        mean = E.mean(dim=rows, keepdim=True)
        row, E = common + mean, E - mean
    else:
        # Rows differ by a mask: take the row that sees the most keys as reference. Equal entries are compared first,
        # because -inf - -inf is NaN.
        seen = (common.softmax(dim=-1) > 0).sum(dim=-1, keepdim=True)
        place = torch.where(hidden, 0, seen).argmax(dim=-2, keepdim=True)
        row, first = (_row(part, place) for part in (common, E))
        E = torch.where(common == row, 0.0, common - row) + (E - first)
        row = row + first
    return row.softmax(dim=axis), _departure(row, 0.0, E, total, axis), total, small


def _row(x: Tensor, place: Tensor) -> Tensor:
    x = x.expand(
        [max(size, other) for size, other in zip(x.shape[:-2], place.shape[:-2], strict=True)] + [*x.shape[-2:]]
    )
    if x.shape[-2] == 1:
        return x
    return x.gather(-2, place.expand(*x.shape[:-2], 1, x.shape[-1]))


def _departure(common: Tensor, scale: float, E: Tensor, total: Tensor, axis: int) -> list[Term]:
    """``softmax(total) - softmax(common)``, where ``total`` is ``common + e^scale E``; no term if that is zero."""
    shape = broadcast(common.shape, E.shape)
    log_pi = common.log_softmax(dim=axis)
    # The pivot is the largest weight. F is E relative to it, and ``others`` are the log-weights without it.
    pivot = log_pi.argmax(dim=axis, keepdim=True)
    others = log_pi.scatter(axis, pivot, -torch.inf)
    pivot = pivot.expand([1 if i == axis else size for i, size in enumerate(shape)])
    F = E.expand(shape) - E.expand(shape).gather(axis, pivot)
    e = exp(scale)
    size = e * largest(F)
    if size < _LARGE:
        unit = _unit(others)
        D = _small(others, unit, F, e, size, axis)
    else:
        after = total.log_softmax(dim=axis).expand(shape).scatter(axis, pivot, -torch.inf)
        unit, scale = _unit(others, after), 0.0
        # Scores relative to the pivot's: a hidden key may have the score -inf or -1e38, which cannot be a reference.
        shifted = total - common.logsumexp(dim=axis, keepdim=True) - e * E.expand(shape).gather(axis, pivot)
        D = _large(others, after, shifted, unit, e * F, axis)
    if unit == -torch.inf:
        return []
    if are_moved():
        # Weights near 1 may differ by less than their last digit; the scores distinguish them.
        D = moved(D, fingerprint(torch.where(total == -torch.inf, 0.0, total), axis))
    # Rows of a softmax sum to one before and after, so D sums to zero: the pivot's entry follows from the others.
    return [normalised(Term(scale + unit, D.scatter(axis, pivot, -summed_along(D, axis))))]


def _unit(*log_weights: Tensor) -> float:
    """Log-scale of the largest of these weights; 0 if none is needed."""
    top = max(float(weights.max()) for weights in log_weights)
    return 0.0 if top > _TINY else top


def _small(others: Tensor, unit: float, F: Tensor, e: float, size: float, axis: int) -> Tensor:
    # Below 2^-54, e^{eF} - 1 equals eF to all digits, and the denominator 1 + e z equals 1.
    hat = F if size < 2.0**-54 else relative_expm1(F, e)
    z = (others.exp() * hat).sum(dim=axis, keepdim=True)
    D = (hat - z).mul_((others - unit).exp())
    return D if size < 2.0**-54 else D.div_(1 + e * z)


def _large(others: Tensor, after: Tensor, shifted: Tensor, unit: float, F: Tensor, axis: int) -> Tensor:
    """``pi expm1(x)`` if the change x of a weight's logarithm is small, a plain difference otherwise.

    A row in which the pivot is hidden has no such x, and needs none.
    """
    # The new normaliser relative to the old one is 1 + sum of the gains; x is F minus its logarithm.
    before = others.exp()
    gain = torch.where(F.abs() < _LARGE, before * torch.expm1(F), shifted.exp() - before)
    x = F - torch.log1p(torch.where(others == -torch.inf, _appearing(F, shifted), gain).sum(dim=axis, keepdim=True))
    before, after = (others - unit).exp(), (after - unit).exp()
    return torch.where(x.abs() < _LARGE, before * torch.expm1(x), after - before)


def _appearing(F: Tensor, shifted: Tensor) -> Tensor:
    """Change of weights that were zero: the pivot does not change; keys that become visible count."""
    return torch.where(F == 0.0, 0.0, shifted.exp())
