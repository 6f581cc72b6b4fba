"""What is found, and the declaration of a row.

A row reads outcomes of experiments and is asked only if all of them are shown. It is declared beside its smallest bad
and good program, which are its test and its page (``rankscope doctor --explain CODE``)::

    @row(reads=("wrong_is_better",), order=50, needs={"loss", "labels"}, bad=negated, good=plain)
    def loss_rewards_wrong(x: Examination, better: Outcome) -> Finding:
        ...
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from rankscope._printing import brief
from rankscope._registry import Registry

if TYPE_CHECKING:
    from rankscope.examination.passes import Examination
    from rankscope.examination.rows.programs import Program
    from rankscope.examination.source import FileEdit

Need = Literal["structure", "loss", "labels", "optimizer"]
Level = Literal["fault", "note", "preview"]
"""What a row may claim: a fault if it accuses no healthy program, a note if it names an effect without blame, and
nothing yet while it is a preview."""


@dataclass(frozen=True)
class Finding:
    """Something that was found in a model.

    Attributes:
        code: name of the row.
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
        edits: the change as text to replace in a function of the user's own files, if it was tried and is such.
    """

    code: str
    sentence: str
    change: str = ""
    certainty: Literal["shown", "possible"] = "shown"
    kind: Literal["fault", "note", "harmless"] = "fault"
    tried: bool = False
    measured: str = ""
    before: float | None = None
    after: float | None = None
    intervention: str = ""
    where: str = ""
    curves: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    edits: tuple[FileEdit, ...] = ()

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
class RowSpec:
    """A row: a function of an examination and of outcomes, and the facts that the verb, the tests and the page use.

    Attributes:
        code: name of the function.
        title: first line of its docstring.
        reads: names of the outcomes, all of which must be shown; see :mod:`rankscope.examination.outcomes`.
        order: rows with a smaller number come first, because they explain those after them.
        read: the function.
        bad: the smallest program in which it is found.
        good: the same program without the fault.
        needs: what it cannot be found without; inputs are always there.
        level: what it may claim.
        despite: codes of faults that do not make its measurements meaningless, although they come first.
    """

    code: str
    title: str
    reads: tuple[str, ...]
    order: int
    read: Callable[..., Finding | None]
    bad: Callable[[], Program]
    good: Callable[[], Program]
    needs: frozenset[Need] = frozenset()
    level: Level = "fault"
    despite: frozenset[str] = frozenset()

    def look(self, x: Examination) -> Finding | None:
        """What it finds."""
        outcomes = [x.outcome(name) for name in self.reads]
        found = self.read(x, *outcomes) if all(one.shown for one in outcomes) else None
        return replace(found, kind="note") if found is not None and self.level == "note" else found


ROWS: Registry[RowSpec] = Registry("row", f"{__package__}.rows")


def row(
    *,
    reads: tuple[str, ...],
    order: int,
    bad: Callable[[], Program],
    good: Callable[[], Program],
    level: Level = "fault",
    needs: frozenset[Need] | set[Need] = frozenset(),
    despite: frozenset[str] | set[str] = frozenset(),
) -> Callable[[Callable[..., Finding | None]], Callable[..., Finding | None]]:
    """Register a function of an examination and some outcomes that returns a finding, or None; see :class:`RowSpec`."""

    def register(read: Callable[..., Finding | None]) -> Callable[..., Finding | None]:
        title = (read.__doc__ or "").strip().split("\n", 1)[0]
        code = read.__name__
        ROWS.add(
            code,
            RowSpec(code, title, reads, order, read, bad, good, frozenset(needs), level, frozenset(despite)),
        )
        return read

    return register
