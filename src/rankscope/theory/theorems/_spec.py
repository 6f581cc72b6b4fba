"""What a theorem declares about itself, and the decorator that declares it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rankscope._citations import Cite
from rankscope._registry import Registry
from rankscope.theory.theorems._evaluation import Evaluation
from rankscope.theory.theorems._quantities import LayerQuantities, Network

Needs = Literal["nothing", "weights", "attention", "activations"]
Sides = Literal["upper", "lower", "two-sided", "construction"]
Evaluate = Callable[[Network, Sequence[LayerQuantities]], Evaluation]


@dataclass(frozen=True)
class Theorem:
    """A statement: facts that the run, the tests, the documentation and the command line read, and one pure function.

    Attributes:
        name: the function's name.
        cites: where it is stated; empty for ours.
        statement: in one formula, LaTeX.
        hypotheses: under which it holds, in words.
        needs: the least it can be evaluated on.
        sides: which side it bounds.
        summary: first line of its docstring.
        function: from a network's numbers to an evaluation.
    """

    name: str
    cites: tuple[Cite, ...]
    statement: str
    hypotheses: tuple[str, ...]
    needs: Needs
    sides: Sides
    summary: str
    function: Evaluate


THEOREMS: Registry[Theorem] = Registry("theorem", "rankscope.theory.theorems")


def theorem(
    *, cites: tuple[Cite, ...], statement: str, hypotheses: tuple[str, ...], needs: Needs, sides: Sides
) -> Callable[[Evaluate], Evaluate]:
    """Register a function of a network and its layers."""

    def register(evaluate: Evaluate) -> Evaluate:
        summary = (evaluate.__doc__ or "").strip().split("\n", 1)[0]
        name = evaluate.__name__
        THEOREMS.add(name, Theorem(name, cites, statement, hypotheses, needs, sides, summary, evaluate))
        return evaluate

    return register
