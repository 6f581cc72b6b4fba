"""The declaration of an oracle: its assumptions, each a test of a design, and one pure function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rankscope._citations import Cite
from rankscope._registry import Registry
from rankscope.ext.theory.prediction import OracleAnswer
from rankscope.models.design import Design

Test = Callable[[Design, int], tuple[bool, Any]]


@dataclass(frozen=True)
class Assumption:
    """A condition on a design and its tokens: a description, and a test that returns whether it holds and the value."""

    words: str
    test: Test


@dataclass(frozen=True)
class Oracle:
    """A prediction from a design alone.

    Attributes:
        name: file and key.
        summary: one line.
        assumptions: all must hold.
        cites: its sources; empty for ours.
        curve: mean squared relative residual by depth, starting with the first tokens; None if it gives no curve.
        values: other numbers, by name.
    """

    name: str
    summary: str
    assumptions: tuple[Assumption, ...]
    cites: tuple[Cite, ...]
    curve: Callable[[Design, int, int], Sequence[float]] | None = None
    values: Callable[[Design, int], dict[str, float]] | None = None


ORACLES: Registry[Oracle] = Registry("oracle", __package__)


def consulted(design: Design, tokens: int, blocks: int) -> list[OracleAnswer]:
    """The answer of every oracle for a design, tokens and blocks, or which of its assumptions fails."""
    return [answer_of(oracle, design, tokens, blocks) for oracle in ORACLES.values()]


def answer_of(oracle: Oracle, design: Design, tokens: int, blocks: int) -> OracleAnswer:
    """The answer of one oracle; without curve and values if an assumption fails."""
    tested = []
    for assumption in oracle.assumptions:
        holds, reason = assumption.test(design, tokens)
        tested.append({"assumption": assumption.words, "holds": bool(holds), "found": reason})
    applies = all(one["holds"] for one in tested)
    curve: Sequence[float] = oracle.curve(design, tokens, blocks) if applies and oracle.curve else ()
    values = oracle.values(design, tokens) if applies and oracle.values else {}
    # NaN stays NaN: a stream of zeros has no relative residual, which is not the same as tokens that are equal.
    logs = tuple(value if math.isnan(value) else 0.5 * math.log10(value) if value > 0 else -math.inf for value in curve)
    return OracleAnswer(oracle.name, applies, tuple(tested), logs, values, tuple(str(cite) for cite in oracle.cites))


def share_of(part: float, whole: float) -> float:
    """``part / whole``; NaN if the whole is zero.

    Example:
        >>> share_of(1.0, 4.0), share_of(0.0, 0.0)
        (0.25, nan)
    """
    return part / whole if whole != 0 else math.nan


def is_complete(design: Design, tokens: int) -> tuple[bool, Any]:
    """Whether every token sees every token."""
    return design.is_complete, design.mask


def is_position_free(design: Design, tokens: int) -> tuple[bool, Any]:
    """Whether scores depend on tokens alone."""
    return design.is_position_free, design.positions


COMPLETE = Assumption("every token sees every token", is_complete)
POSITION_FREE = Assumption("scores depend on tokens alone", is_position_free)
