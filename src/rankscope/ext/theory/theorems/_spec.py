"""The declaration of a theorem, and the decorator that registers one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rankscope._citations import Cite
from rankscope._registry import Registry
from rankscope.ext.theory.theorems._quantities import LayerQuantities, Network, Passage


@dataclass(frozen=True)
class Hypothesis:
    """A condition of a theorem, tested.

    Attributes:
        name: a short description.
        value: the value found; NaN if it could not be determined.
        threshold: the value it is compared with.
        sense: ``"at most"`` or ``"at least"``.
    """

    name: str
    value: float
    threshold: float
    sense: Literal["at most", "at least"] = "at most"

    @property
    def margin(self) -> float:
        """By how much it holds; negative if it fails. NaN if the value is not known.

        Example:
            >>> Hypothesis("spread", 1.0, 1.256).margin > 0, Hypothesis("rank", 3, 4, "at least").margin
            (True, -1)
        """
        if self.value == self.threshold:
            return 0.0
        return self.threshold - self.value if self.sense == "at most" else self.value - self.threshold

    @property
    def holds(self) -> bool:
        """Whether it holds; False if the value is not known."""
        return self.margin >= 0


def claim(name: str, holds: bool) -> Hypothesis:
    """A yes-or-no condition, as one or zero, compared with one half."""
    return Hypothesis(name, float(holds), 0.5, "at least")


@dataclass(frozen=True)
class LayerBound:
    """Bounds on one quantity, all as natural logarithms.

    Attributes:
        layer: number of the block; None for the whole depth.
        log_upper: upper bound, None if the theorem gives none.
        log_lower: lower bound, None if it gives none.
        log_measured: the quantity itself, None if it was not measured.
        hypotheses: those of this layer.
        log_factor: the factor in the bound that does not depend on the tokens, if there is one.
        at_floor: the measured value is only rounding.
        log_rounding: how much rounding may have changed ``log_measured``.
    """

    layer: int | None
    log_upper: float | None = None
    log_lower: float | None = None
    log_measured: float | None = None
    hypotheses: tuple[Hypothesis, ...] = ()
    log_factor: float | None = None
    at_floor: bool = False
    log_rounding: float = 0.0

    @property
    def log_slack(self) -> float | None:
        """Distance of the measured value to the upper bound, or to the lower bound if there is no upper."""
        if self.log_measured is None:
            return None
        if self.log_upper is not None:
            return self.log_upper - self.log_measured
        return None if self.log_lower is None else self.log_measured - self.log_lower

    @property
    def log_width(self) -> float | None:
        """Distance from the lower to the upper bound; inf if the lower bound is zero."""
        return None if self.log_upper is None or self.log_lower is None else self.log_upper - self.log_lower

    @property
    def holds(self) -> bool:
        """Whether every hypothesis of this layer holds."""
        return all(hypothesis.holds for hypothesis in self.hypotheses)

    @property
    def is_violated(self) -> bool:
        """Whether the measured value lies outside the bounds, by more than its rounding."""
        if self.log_measured is None or math.isnan(self.log_measured) or self.at_floor:
            return False
        above = self.log_upper is not None and self.log_measured - self.log_rounding > self.log_upper
        return above or (self.log_lower is not None and self.log_measured + self.log_rounding < self.log_lower)


@dataclass(frozen=True)
class Evaluation:
    """One theorem on one network (and one sequence).

    Attributes:
        theorem: its name.
        quantity: what is bounded, in words.
        layers: one entry per layer.
        depth: the whole network; None if the theorem is about single layers only.
        hypotheses: those on the network as a whole.
        sentence: the result in one sentence.
        cumulative: the bound of a layer also depends on every layer before it.
    """

    theorem: str
    quantity: str
    layers: tuple[LayerBound, ...]
    depth: LayerBound | None
    hypotheses: tuple[Hypothesis, ...]
    sentence: str
    cumulative: bool = False

    @property
    def violated(self) -> tuple[LayerBound, ...]:
        """Bounds that the measured value violates although every hypothesis holds. There must be none.

        Such a bound is wrong, or one of its hypotheses is not tested, or the model was read wrongly.
        """
        if not all(h.holds for h in self.hypotheses):
            return ()
        violated = [
            bound
            for number, bound in enumerate(self.layers)
            if bound.is_violated and all(b.holds for b in (self.layers[: number + 1] if self.cumulative else (bound,)))
        ]
        if self.depth is not None and self.depth.is_violated and self.depth.holds and self.applies:
            violated.append(self.depth)
        return tuple(violated)

    @property
    def applies(self) -> bool:
        """Whether every hypothesis holds, of the network and of every layer."""
        return all(h.holds for h in self.hypotheses) and all(layer.holds for layer in self.layers)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of hypotheses that do not hold, each once."""
        names = [h.name for h in self.hypotheses if not h.holds]
        names += [h.name for layer in self.layers for h in layer.hypotheses if not h.holds]
        return tuple(dict.fromkeys(names))


def log(value: float) -> float:
    """Natural logarithm; -inf for zero."""
    return math.log(value) if value > 0 else (-math.inf if value == 0 else math.nan)


def log_ratio(above: float, below: float) -> float:
    """Logarithm of a quotient of two lengths, also beyond the range of floats; NaN for 0 / 0.

    Example:
        >>> log_ratio(1e-300, 1e300) < -1380, log_ratio(0.0, 1.0)
        (True, -inf)
    """
    return log(above) - log(below) if below > 0 else math.nan


def powers_of_ten(log_value: float) -> str:
    """A logarithm as a power of ten, for sentences.

    Example:
        >>> powers_of_ten(log(1000.0)), powers_of_ten(log(0.5))
        ('10^3', '0.5')
    """
    if math.isinf(log_value):
        return "0" if log_value < 0 else "infinity"
    tens = log_value / math.log(10)
    return f"{math.exp(log_value):.3g}" if abs(tens) < 2.5 else f"10^{tens:.4g}"


def rows_add_up(seen: Passage) -> Hypothesis:
    """Hypothesis: no sink outside the sequence and no attention to padding, so that what tokens share cancels."""
    return Hypothesis("rows of attention add up to one", max(seen.row_gap, seen.outside), 4 * seen.unit)


def heads_make_it_up(seen: Passage) -> tuple[Hypothesis, ...]:
    """Hypotheses: attention stays among the tokens that count, and its output is the sum over its heads."""
    return (
        Hypothesis("attention stays within the tokens that count", seen.outside, 4 * seen.unit),
        Hypothesis("what attention gives is the sum of its heads", seen.heads_gap, max(seen.rounding, 4 * seen.unit)),
    )


def alone(seen: Passage) -> Hypothesis:
    """Hypothesis: the block returns attention of the stream and nothing else."""
    return Hypothesis("the block is attention alone", seen.alone_gap, 4 * seen.unit)


def on_the_sphere(seen: Passage) -> tuple[Hypothesis, ...]:
    """Hypothesis: the block returns attention of tokens of unit length, scaled to unit length."""
    return (
        Hypothesis("the block is attention and scaling to unit length", seen.sphere_gap, 4 * seen.unit),
        Hypothesis("no value or output bias", seen.bias, 0.0),
    )


Sides = Literal["upper", "lower", "two-sided", "construction"]
Evaluate = Callable[[Network, Sequence[LayerQuantities]], Evaluation]


@dataclass(frozen=True)
class Theorem:
    """A statement: one pure function, and the facts that runs, tests, documentation and the command line use.

    Attributes:
        name: the function's name.
        cites: its sources; empty for ours.
        statement: in one formula, LaTeX.
        hypotheses: the conditions under which it holds, in words.
        sides: which side it bounds.
        summary: first line of its docstring.
        function: maps a network's numbers to an evaluation.
    """

    name: str
    cites: tuple[Cite, ...]
    statement: str
    hypotheses: tuple[str, ...]
    sides: Sides
    summary: str
    function: Evaluate


THEOREMS: Registry[Theorem] = Registry("theorem", __package__)


def theorem(
    *, cites: tuple[Cite, ...], statement: str, hypotheses: tuple[str, ...], sides: Sides
) -> Callable[[Evaluate], Evaluate]:
    """Register a function of a network and its layers."""

    def register(evaluate: Evaluate) -> Evaluate:
        summary = (evaluate.__doc__ or "").strip().split("\n", 1)[0]
        name = evaluate.__name__
        THEOREMS.add(name, Theorem(name, cites, statement, hypotheses, sides, summary, evaluate))
        return evaluate

    return register
