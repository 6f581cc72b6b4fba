r"""Softmax, over keys or experts.

With :math:`\pi` the softmax of what rows have in common and E the rest at scale :math:`\epsilon`, the difference is
:math:`D_{ij} = \pi_j (\hat E_{ij} - z_i) / (1 + \epsilon z_i)`, :math:`\hat E = (e^{\epsilon E} - 1)/\epsilon`,
:math:`z_i = \sum_j \pi_j \hat E_{ij}`. Exact. Parts that are constant along the axis cancel, and are dropped unseen.

A saturated softmax, of which one weight is all but 1 and the others are tiny, needs two things more. E may be shifted
by a number per row: it is shifted to zero at the largest weight, so that the tiny ones are never added to a number near
1. And D at the largest weight is minus the sum of D elsewhere, not a difference of two numbers near 1. The tiny weights
get a log-scale, so that they do not underflow.

Rows that differ by mask or position have their differences taken in steps: first those of the rows at the common point,
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

# Logarithms of weights that differ by more than this are subtracted as weights: a third of the larger is left.
_LARGE = 0.5
# Scores below this hide a key: the least number of every float format is below it, whatever is added to that.
_HIDDEN = -6e4
# Weights above e^-20 need no scale of their own.
_TINY = -20.0


@rule(aten._softmax, aten.softmax, "_safe_softmax")
def softmax(x: Deviation, dim: int, *options: Any, **named: Any) -> Deviation:
    """Softmax along an axis."""
    axis = dim % x.dim()
    common, terms = _split_off_common(x, axis)
    if common.shape[axis] == 1 < x.shape[axis]:
        common = common.expand(*(x.shape[i] if i == axis else size for i, size in enumerate(common.shape)))
    # A row whose keys are all hidden by one huge number (that of a padded token) is a row of equal scores; beside that
    # number the scores of other rows would lose every digit.
    top = common.amax(dim=axis, keepdim=True)
    hidden = (top < _HIDDEN) & top.isfinite()
    common = torch.where(hidden, common - top, common)
    pi, out, common, terms = _at_order_one(common, terms, axis, hidden)
    for scale, E in terms:
        total = added(common, E, scale)
        out += _departure(common, scale, E, total, axis)
        common = total
    return Deviation(pi, out, x.shape, null_axis=axis, base_sum=1.0)


def _split_off_common(x: Deviation, axis: int) -> tuple[Tensor, list[Term]]:
    """What counts along the axis: the common part of rows in plain arithmetic, and the terms, largest scale first.

    Terms that do not differ between rows belong to the common part; where that differs between rows already, only those
    of no small scale do (a mask).
    """
    base = x.base if x.base.shape[axis] > 1 or x.shape[axis] == 1 else torch.zeros_like(x.base)
    terms = [term for term in x.terms if term.values.shape[axis] > 1 or x.shape[axis] == 1]
    if not terms:
        return base, []
    full = broadcast(*(term.values.shape for term in terms))
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
    """A row of weights near all rows, by how much rows depart from it, their scores so far, and the terms left over.

    The row takes in what is not small, so that if all rows settle on one weight, it does too, and their differences are
    small numbers rather than differences of large ones. A row that is ``hidden`` stands for none.
    """
    count = sum(not exp(scale) * largest(E) < _LARGE for scale, E in terms)
    large, small = terms[:count], terms[count:]
    total, E = common, torch.zeros_like(common)
    for term in large:
        total, E = added(total, term.values, term.log_scale), added(E, term.values, term.log_scale)
    if not _rows_differ(common, axis):
        rows = [i for i, size in enumerate(E.shape) if i != axis and common.shape[i] == 1 < size]
        if not rows:
            return total.softmax(dim=axis), [], total, small
        mean = E.mean(dim=rows, keepdim=True)
        row, E = common + mean, E - mean
    else:
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
    """``softmax(total) - softmax(common)``, where ``total`` is ``common + e^scale E``; nothing if that is zero."""
    shape = broadcast(common.shape, E.shape)
    log_pi = common.log_softmax(dim=axis)
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
        # Scores from the pivot's on: a hidden key's score may be -inf or -1e38, from which no other can be subtracted.
        shifted = total - common.logsumexp(dim=axis, keepdim=True) - e * E.expand(shape).gather(axis, pivot)
        D = _large(others, after, shifted, unit, e * F, axis)
    if unit == -torch.inf:
        return []
    if are_moved():
        # Weights near 1 that differ by less than their last digit are told apart by the scores they came from.
        D = moved(D, fingerprint(torch.where(total == -torch.inf, 0.0, total), axis))
    return [normalised(Term(scale + unit, D.scatter(axis, pivot, -summed_along(D, axis))))]


def _unit(*log_weights: Tensor) -> float:
    """Scale of the largest of these weights, 0 where none is needed."""
    top = max(float(weights.max()) for weights in log_weights)
    return 0.0 if top > _TINY else top


def _small(others: Tensor, unit: float, F: Tensor, e: float, size: float, axis: int) -> Tensor:
    hat = F if size < 2.0**-54 else relative_expm1(F, e)
    z = (others.exp() * hat).sum(dim=axis, keepdim=True)
    D = (hat - z).mul_((others - unit).exp())
    return D if size < 2.0**-54 else D.div_(1 + e * z)


def _large(others: Tensor, after: Tensor, shifted: Tensor, unit: float, F: Tensor, axis: int) -> Tensor:
    """With x the change of a weight's logarithm, ``pi expm1(x)`` where x is small, a plain difference elsewhere.

    A row in which the pivot is hidden has no such x, and needs none.
    """
    before = others.exp()
    gain = torch.where(F.abs() < _LARGE, before * torch.expm1(F), shifted.exp() - before)
    x = F - torch.log1p(torch.where(others == -torch.inf, _appearing(F, shifted), gain).sum(dim=axis, keepdim=True))
    before, after = (others - unit).exp(), (after - unit).exp()
    return torch.where(x.abs() < _LARGE, before * torch.expm1(x), after - before)


def _appearing(F: Tensor, shifted: Tensor) -> Tensor:
    """Weights that were zero: the pivot's own change is none, those of keys that come into sight count."""
    return torch.where(F == 0.0, 0.0, shifted.exp())
