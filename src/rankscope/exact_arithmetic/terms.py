"""Terms ``e^s D``, and how they are added without losing the small ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.exact_arithmetic.rounding import are_moved, moved

# All differences below are differences of natural logarithms.
# A term of smaller shape is added to a larger one only if its scale is at most e^3 times as large: one digit is lost.
APART = 3.0
# Adding terms whose scales differ by e^10 leaves twelve of the sixteen digits of the smaller one.
LOST = 10.0
# Terms of one shape with scales closer than e^8 are added: if the larger cancels later, nine digits remain.
_NEAR = 8.0
# At most this many terms of one shape are kept: first to third order of attention under a mask, and one more.
_ORDERS = 4

# If all values of a term are smaller than this, their magnitude is moved into the log-scale.
_SMALL = 1e-3


class Term(NamedTuple):
    """``e^{log_scale} values``; axes along which it is constant have size 1."""

    log_scale: float
    values: Tensor


def broadcast(*shapes: Sequence[int]) -> torch.Size:
    """The shape these broadcast to."""
    out: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return out


def exp(log_scale: float) -> float:
    """``e^log_scale``; zero if that underflows, infinite if it overflows."""
    if log_scale > 709.0:
        return math.inf
    return math.exp(log_scale) if log_scale > -745.0 else 0.0


def scaled(log_scale: float, values: Tensor) -> Tensor:
    """``e^log_scale values``, without a multiplication if the scale is 1."""
    return values if log_scale == 0.0 else values * exp(log_scale)


def summed(terms: Sequence[Term]) -> Term:
    """The sum of all terms as one term; small ones are rounded to the precision of the largest."""
    if len(terms) == 1:
        return terms[0]
    out, *rest = sorted(_live(terms), key=lambda term: -term.log_scale)
    for term in rest:
        out = _sum(out, term)
    return out


def gathered(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Add terms of the same stored shape and similar scale, and add terms of a smaller shape to a larger one.

    Terms stay separate if adding them would lose digits: terms of smaller shape and much larger scale, and terms of the
    same shape and very different scales, because a later operation may cancel the large one.
    """
    groups: dict[torch.Size, list[Term]] = {}
    for term in _live(terms):
        groups.setdefault(term.values.shape, []).append(term)
    alike = [part for group in groups.values() for part in by_scale(group)]
    kept: list[Term] = []
    # Largest shape first, so that every smaller term finds the terms it could be added to.
    for term in sorted(alike, key=lambda term: -term.values.numel()):
        for place, large in enumerate(kept):
            if _fits(term, large) and term.log_scale - large.log_scale < APART:
                kept[place] = _sum(large, term)
                break
        else:
            kept.append(term)
    return tuple(kept)


def by_scale(terms: Sequence[Term]) -> list[Term]:
    """Add terms with similar scales, largest scale first; everything after the fourth term is added to it."""
    out: list[Term] = []
    for term in sorted(_live(terms), key=lambda term: -term.log_scale):
        if out and (out[-1].log_scale - term.log_scale < _NEAR or len(out) == _ORDERS):
            out[-1] = _sum(out[-1], term)
        else:
            out.append(term)
    return out


def common_parts(base: Tensor, terms: Sequence[Term]) -> tuple[Tensor, list[Term]]:
    """Add to the base all terms that are constant over the same rows as the base, and so need no separate scale.

    A term that varies along one more axis before the last is kept: in a sequence split into windows, the means of the
    windows differ between tokens, although each is the same for all rows of its window.
    """
    kept = []
    for term in terms:
        if broadcast(base.shape[:-1], term.values.shape[:-1]) == base.shape[:-1]:
            base = base + scaled(term.log_scale, term.values)
        else:
            kept.append(term)
    return base, kept


def _fits(small: Term, large: Term) -> bool:
    """Whether ``small`` has a smaller shape that broadcasts to that of ``large``."""
    one, other = small.values.shape, large.values.shape
    return one != other and broadcast(one, other) == other


def _sum(one: Term, other: Term) -> Term:
    large, small = (one, other) if one.log_scale >= other.log_scale else (other, one)
    return Term(large.log_scale, added(large.values, small.values, small.log_scale - large.log_scale))


def added(large: Tensor, small: Tensor, log_factor: float) -> Tensor:
    """``large + e^log_factor small``. Every sum that can lose a part goes through here."""
    factor = exp(log_factor)
    if not are_moved():
        return large if factor == 0.0 else torch.add(large, small, alpha=factor)
    out = torch.add(large, small, alpha=factor)
    # If the sum was rounded, the perturbation depends on both summands, so that a lost difference becomes visible.
    # If it was exact, it depends on the sum alone, so that equal sums stay equal.
    part = small * factor
    whole = (out - large == part) & (out - part == large) & (factor != 0.0)
    return moved(out, *(torch.where(whole, 0.0, lost) for lost in (large, small)))


def _live(terms: Sequence[Term]) -> Sequence[Term]:
    """Terms with comparable scales, without zero terms (but at least one term)."""
    if len(terms) < 2:
        return terms
    return [normalised(term) for term in terms if bool(term.values.any())] or terms[:1]


def normalised(term: Term) -> Term:
    """The same term with values of order one, if they are all small, so that log-scales can be compared."""
    size = float(term.values.abs().max()) if term.values.numel() else 0.0
    if not 0.0 < size < _SMALL:
        return term
    return Term(term.log_scale + math.log(size), term.values / size)


def one_row(base: Tensor) -> Tensor:
    """Store a base as one row if its rows are equal to the last bit."""
    for axis in range(base.dim() - 1):
        head = base.narrow(axis, 0, 1)
        if base.shape[axis] > 1 and bool((base == head).all()):
            base = head
    return base
