"""The declaration of a cause, what it finds, and the registry.

A cause is a generator of findings, or a row. A row reads outcomes of experiments and is asked only if all of them are
shown; it is declared beside its smallest bad and good program, which are its test::

    @row(reads=("rewards",), order=52, needs={"loss", "labels"}, bad=negated, good=plain)
    def loss_rewards_wrong(x: Examination, rewards: Outcome) -> Finding:
        ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from rankscope._citations import Cite
from rankscope._printing import brief
from rankscope._registry import Registry

if TYPE_CHECKING:
    from rankscope.examination._examination import Examination
    from rankscope.examination._examples import Program

Need = Literal["structure", "loss", "labels", "optimizer"]
Certainty = Literal["shown", "possible"]
Kind = Literal["fault", "note", "harmless"]
Level = Literal["fault", "note", "preview"]
"""What a row may claim: a fault if it accuses no healthy program, a note if it names an effect without blame, and
nothing yet while it is a preview."""


@dataclass(frozen=True)
class Finding:
    """Something that was found in a model.

    Attributes:
        code: name of the cause.
        sentence: what is wrong, in one sentence.
        change: what to change, in the user's terms; empty if nothing is known to help.
        certainty: ``"shown"`` if an experiment proves it, ``"possible"`` otherwise.
        kind: ``"harmless"`` for what looks like a fault and is none, ``"note"`` for a fact that may be meant.
        tried: whether the change was carried out on a copy, ran, and the fault was gone; otherwise it is a hint.
        measured: what the two numbers are.
        before: the number as the model is.
        after: the number with the intervention.
        intervention: what was done, on a copy or inside a ``with`` block.
        where: module or blocks concerned.
        curves: the same number after each block, as the model is and with the intervention, if it has one per block.
    """

    code: str
    sentence: str
    change: str = ""
    certainty: Certainty = "shown"
    kind: Kind = "fault"
    tried: bool = False
    measured: str = ""
    before: float | None = None
    after: float | None = None
    intervention: str = ""
    where: str = ""
    curves: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())

    __repr__ = brief

    @property
    def evidence(self) -> str:
        """The two numbers as a sentence; empty if there are none."""
        if self.before is None:
            return ""
        if self.after is None:
            return f"{self.measured}: {told(self.before)}."
        return f"{self.measured}: {told(self.before)} as it is, {told(self.after)} {self.intervention}."

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "evidence": self.evidence}


def told(value: float) -> str:
    """A measured number with three digits."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 1000 or (value == int(value) and abs(value) >= 1) else f"{value:.3g}"


@dataclass(frozen=True)
class CauseSpec:
    """A cause: one function of an examination, and the facts that the verb, the tests and the documentation use.

    Attributes:
        code: name of the function.
        title: first line of its docstring.
        needs: what it cannot be found without; inputs are always there.
        proof: how it is proven.
        change: what to change.
        order: causes with a smaller number come first, because they explain those after them.
        look: the function.
        cites: sources.
        despite: codes of faults that do not make its measurements meaningless, although they come first.
        level: what it may claim.
        bad: the smallest program in which it is found; None for a cause that is no row.
        good: the same program without the fault.
    """

    code: str
    title: str
    needs: frozenset[Need]
    proof: str
    change: str
    order: int
    look: Callable[[Examination], Iterator[Finding]]
    cites: tuple[Cite, ...] = ()
    despite: frozenset[str] = frozenset()
    level: Level = "fault"
    bad: Callable[[], Program] | None = None
    good: Callable[[], Program] | None = None


CAUSES: Registry[CauseSpec] = Registry("cause", __package__)

Look = Callable[["Examination"], Iterator[Finding]]


def cause(
    *,
    proof: str,
    change: str,
    order: int,
    needs: frozenset[Need] | set[Need] = frozenset(),
    cites: tuple[Cite, ...] = (),
    despite: frozenset[str] | set[str] = frozenset(),
) -> Callable[[Look], Look]:
    """Register a generator of findings under its own name, which is their code."""

    def register(look: Look) -> Look:
        title = (look.__doc__ or "").strip().split("\n", 1)[0]
        spec = CauseSpec(look.__name__, title, frozenset(needs), proof, change, order, look, cites, frozenset(despite))
        CAUSES.add(look.__name__, spec)
        return look

    return register


def row(
    *,
    reads: tuple[str, ...],
    order: int,
    bad: Callable[[], Program],
    good: Callable[[], Program],
    level: Level = "fault",
    needs: frozenset[Need] | set[Need] = frozenset(),
) -> Callable[[Callable[..., Finding | None]], Callable[..., Finding | None]]:
    """Register a function of an examination and some outcomes that returns a finding, or None.

    Args:
        reads: names of the outcomes; see :mod:`rankscope.examination._outcomes`.
        order: causes with a smaller number come first.
        bad: the smallest program in which it is found.
        good: the same program without the fault.
        level: what it may claim.
        needs: what it cannot be found without.
    """

    def register(read: Callable[..., Finding | None]) -> Callable[..., Finding | None]:
        def look(x: Examination) -> Iterator[Finding]:
            outcomes = [x.outcome(name) for name in reads]
            found = read(x, *outcomes) if all(one.shown for one in outcomes) else None
            if found is not None:
                yield replace(found, kind="note") if level == "note" else found

        title = (read.__doc__ or "").strip().split("\n", 1)[0]
        spec = CauseSpec(
            read.__name__, title, frozenset(needs), f"outcomes of {', '.join(reads)}", "", order, look,
            level=level, bad=bad, good=good,
        )  # fmt: skip
        CAUSES.add(read.__name__, spec)
        return read

    return register
