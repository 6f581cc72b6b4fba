"""Hypotheses on one layer that several theorems share, each tested on what the model computed."""

from __future__ import annotations

from rankscope.theory.theorems._evaluation import Hypothesis
from rankscope.theory.theorems._quantities import Passage


def rows_add_up(seen: Passage) -> Hypothesis:
    """No sink outside the sequence and no attention to padding: else what tokens share does not cancel."""
    return Hypothesis("rows of attention add up to one", max(seen.row_gap, seen.outside), 4 * seen.unit)


def heads_make_it_up(seen: Passage) -> tuple[Hypothesis, ...]:
    """Attention stays among the tokens that count, and its output is what its heads make of them."""
    return (
        Hypothesis("attention stays within the tokens that count", seen.outside, 4 * seen.unit),
        Hypothesis("what attention gives is the sum of its heads", seen.heads_gap, max(seen.rounding, 4 * seen.unit)),
    )


def alone(seen: Passage) -> Hypothesis:
    """The block gives back attention of the stream and nothing else."""
    return Hypothesis("the block is attention alone", seen.alone_gap, 4 * seen.unit)


def on_the_sphere(seen: Passage) -> tuple[Hypothesis, ...]:
    """The block gives back attention of tokens of unit length, scaled to unit length."""
    return (
        Hypothesis("the block is attention and scaling to unit length", seen.sphere_gap, 4 * seen.unit),
        Hypothesis("no value or output bias", seen.bias, 0.0),
    )
