"""Terms ``e^s D`` and how they add up without losing the small ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.exact_arithmetic.rounding import are_moved, moved

# Scales this far apart are kept apart: a digit is lost at most.
APART = 3.0
# Scales e^10 apart leave twelve of sixteen digits.
LOST = 10.0
# Terms of one shape and scales this near are added up: if what is larger cancels later, nine digits are left.
_NEAR = 8.0
# So many terms of one shape are kept: what attention under a mask leaves of first to third order, and one more.
_ORDERS = 4

# Terms whose numbers are all smaller than this get the rest of it in their scale.
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
    """``e^log_scale``, zero where that underflows, infinite where it overflows."""
    if log_scale > 709.0:
        return math.inf
    return math.exp(log_scale) if log_scale > -745.0 else 0.0


def scaled(log_scale: float, values: Tensor) -> Tensor:
    """``e^log_scale values``, without a pass over them where it is one."""
    return values if log_scale == 0.0 else values * exp(log_scale)


def summed(terms: Sequence[Term]) -> Term:
    """All terms in one, small ones rounded in the units of the largest."""
    if len(terms) == 1:
        return terms[0]
    out, *rest = sorted(_live(terms), key=lambda term: -term.log_scale)
    for term in rest:
        out = _sum(out, term)
    return out


def gathered(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Terms of the same stored shape and like scale added up, and terms of a smaller shape added to a larger one.

    Terms that would be swamped stay apart: those of smaller shape and much larger scale, and those of one shape and
    very different scales, of which a later operation may cancel the large one.
    """
    groups: dict[torch.Size, list[Term]] = {}
    for term in _live(terms):
        groups.setdefault(term.values.shape, []).append(term)
    alike = [part for group in groups.values() for part in by_scale(group)]
    kept: list[Term] = []
    for term in sorted(alike, key=lambda term: -term.values.numel()):
        for place, large in enumerate(kept):
            if _fits(term, large) and term.log_scale - large.log_scale < APART:
                kept[place] = _sum(large, term)
                break
        else:
            kept.append(term)
    return tuple(kept)


def by_scale(terms: Sequence[Term]) -> list[Term]:
    """Terms with scales near each other added up, largest scale first; what comes after the fourth is added to it."""
    out: list[Term] = []
    for term in sorted(_live(terms), key=lambda term: -term.log_scale):
        if out and (out[-1].log_scale - term.log_scale < _NEAR or len(out) == _ORDERS):
            out[-1] = _sum(out[-1], term)
        else:
            out.append(term)
    return out


def common_parts(base: Tensor, terms: Sequence[Term]) -> tuple[Tensor, list[Term]]:
    """Terms that are the same for all rows the base is the same for, added to it: as common as it, they need no scale.

    A term that varies along one more axis before the last stays: window means of a sequence cut into windows differ
    between tokens, although each is the same for all rows of its window.
    """
    kept = []
    for term in terms:
        if broadcast(base.shape[:-1], term.values.shape[:-1]) == base.shape[:-1]:
            base = base + scaled(term.log_scale, term.values)
        else:
            kept.append(term)
    return base, kept


def _fits(small: Term, large: Term) -> bool:
    """Whether the one has a smaller shape, and adding it to the other leaves the shape of the other."""
    one, other = small.values.shape, large.values.shape
    return one != other and broadcast(one, other) == other


def _sum(one: Term, other: Term) -> Term:
    large, small = (one, other) if one.log_scale >= other.log_scale else (other, one)
    return Term(large.log_scale, added(large.values, small.values, small.log_scale - large.log_scale))


def added(large: Tensor, small: Tensor, log_factor: float) -> Tensor:
    """``large + e^log_factor small``; every sum in which a part can be lost is taken here."""
    factor = exp(log_factor)
    if not are_moved():
        return large if factor == 0.0 else torch.add(large, small, alpha=factor)
    out = torch.add(large, small, alpha=factor)
    # The movement looks at both parts where one was rounded; where none was, sums of equal numbers stay equal.
    part = small * factor
    whole = (out - large == part) & (out - part == large) & (factor != 0.0)
    return moved(out, *(torch.where(whole, 0.0, lost) for lost in (large, small)))


def _live(terms: Sequence[Term]) -> Sequence[Term]:
    """Terms with scales that can be compared: those that are zero are gone, as long as one is left."""
    if len(terms) < 2:
        return terms
    return [normalised(term) for term in terms if bool(term.values.any())] or terms[:1]


def normalised(term: Term) -> Term:
    """The same term with numbers of order one, if they are all small: scales are compared where terms meet."""
    size = float(term.values.abs().max()) if term.values.numel() else 0.0
    if not 0.0 < size < _SMALL:
        return term
    return Term(term.log_scale + math.log(size), term.values / size)


def one_row(base: Tensor) -> Tensor:
    """A base stored as one row where its rows turn out equal to the last bit."""
    for axis in range(base.dim() - 1):
        head = base.narrow(axis, 0, 1)
        if base.shape[axis] > 1 and bool((base == head).all()):
            base = head
    return base
