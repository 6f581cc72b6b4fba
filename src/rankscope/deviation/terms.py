"""Terms ``e^s D`` and how they add up without losing the small ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Scales this far apart are kept apart: a digit is lost at most.
_APART = 3.0


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
    top = max(term.log_scale for term in terms)
    values = terms[0].values * exp(terms[0].log_scale - top)
    for term in terms[1:]:
        values = torch.add(values, term.values, alpha=exp(term.log_scale - top))
    return Term(top, values)


def gathered(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Terms of the same stored shape added up, and terms of a smaller shape added to a larger one of no smaller scale.

    A term of smaller shape and much larger scale stays apart: it would swamp the other.
    """
    groups: dict[torch.Size, Term] = {}
    for term in terms:
        held = groups.get(term.values.shape)
        groups[term.values.shape] = term if held is None else _sum(held, term)
    kept: list[Term] = []
    for term in sorted(groups.values(), key=lambda term: -term.values.numel()):
        for place, large in enumerate(kept):
            if _fits(term, large) and term.log_scale - large.log_scale < _APART:
                kept[place] = _sum(large, term)
                break
        else:
            kept.append(term)
    return tuple(kept)


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
    """Whether adding the one to the other leaves the shape of the other."""
    return broadcast(small.values.shape, large.values.shape) == large.values.shape


def _sum(one: Term, other: Term) -> Term:
    large, small = (one, other) if one.log_scale >= other.log_scale else (other, one)
    factor = exp(small.log_scale - large.log_scale)
    return large if factor == 0.0 else Term(large.log_scale, torch.add(large.values, small.values, alpha=factor))


def one_row(base: Tensor) -> Tensor:
    """A base stored as one row where its rows turn out equal to the last bit."""
    for axis in range(base.dim() - 1):
        head = base.narrow(axis, 0, 1)
        if base.shape[axis] > 1 and bool((base == head).all()):
            base = head
    return base
