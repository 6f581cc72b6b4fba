"""Deviations whose terms are brought together, or that are written into."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rankscope.exact_arithmetic.registry import refuse
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.exact_arithmetic.terms import LOST, Term, exp, one_row, summed


def merged(x: Deviation) -> Deviation:
    """The same value with one term at most; small terms are rounded in the units of the largest."""
    if len(x.terms) < 2:
        return x
    return Deviation(x.base, (summed(x.terms),), x.shape, null_axis=x.null_axis, base_sum=x.base_sum)


def joined(x: Deviation) -> Deviation:
    """``x`` with one term, as a function that is not linear needs it.

    Raises:
        UnsupportedArithmeticError: terms so far apart in scale that the small ones would be lost, beside a base whose
            rows are equal: scores of attention without positions, say, which only a softmax can take in.
    """
    if len(x.terms) < 2:
        return x
    scales = [term.log_scale for term in x.terms]
    shapes = {term.values.shape for term in x.terms}
    if max(scales) - min(scales) > LOST and len(shapes) > 1 and x.base.shape != x.shape:
        refuse("a function that is not linear", "it acts on attention scores without positions, before their softmax")
    return merged(x)


def written(x: Deviation, new: Deviation, write_back: Callable[[Tensor, Tensor], Tensor]) -> Deviation:
    """``x`` after ``new`` was written to a part of it."""
    held, other = merged(x), merged(new)
    base = write_back(held.base.expand(x.shape), other.base.expand(new.shape))
    top = max((term.log_scale for term in (*held.terms, *other.terms)), default=0.0)
    values = write_back(_at_scale(held, top), _at_scale(other, top))
    return Deviation(one_row(base), (Term(top, values),) if held.terms or other.terms else (), x.shape)


def _at_scale(x: Deviation, scale: float) -> Tensor:
    if not x.terms:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return (x.terms[0].values * exp(x.terms[0].log_scale - scale)).expand(x.shape)
