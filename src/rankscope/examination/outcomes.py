"""Outcomes: what experiments see, each with what its control sees.

An outcome is yes, no, or not read; what was not read supports no claim. An experiment is a function of an examination
that returns one. It runs when a row asks for it, and once::

    @experiment
    def rewards(x: Examination) -> Outcome:
        return Outcome(seen=wrong < right, control=two_equal_calls_differ, numbers={"wrong": wrong, "right": right})

A claim needs both: the outcome is yes, and its control is no. The control is the same reading where there is nothing
to be seen: two equal passes, labels that each move their own output, the same step in float32, fresh weights. It is
never written down as a constant; a test reads the source for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rankscope.errors import RankscopeError

Experiment = Callable[[Any], "Outcome"]
"""A function of an :class:`~rankscope.examination.Examination`, which imports this module."""


@dataclass(frozen=True)
class Outcome:
    """What an experiment saw.

    Attributes:
        seen: whether it is so; None if it was not read.
        control: the same where it must not be so; None if it was not read.
        numbers: what a sentence about it needs.
    """

    seen: bool | None
    control: bool | None
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> bool:
        """Whether it is so, and is not so in the control."""
        return self.seen is True and self.control is False

    def __getitem__(self, name: str) -> Any:
        return self.numbers[name]


NOT_READ = Outcome(None, None)
NO = Outcome(False, None)
"""It is not so; then no control is asked for."""
EXPERIMENTS: dict[str, Experiment] = {}


def experiment(run: Experiment) -> Experiment:
    """Register an experiment under the name of its function."""
    EXPERIMENTS[run.__name__] = run
    return run


FAILS = (
    RankscopeError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    NotImplementedError,
)
"""What a model or a loss raises if it does not run in an experiment."""


def outcome_of(x: Any, name: str) -> Outcome:
    """The outcome of one experiment; not read if the model or the loss does not run in it."""
    try:
        return EXPERIMENTS[name](x)
    except FAILS:
        return NOT_READ
