"""The declaration of a row.

A row reads the outcome of an experiment and is asked only if it is shown. It is declared beside the smallest program
without the fault and the lines with which it has it, which are its test and its page (``doctor --explain CODE``)::

    @row("wrong_is_better", order=50, needs={"loss", "labels"}, good=CLASSIFIER,
         fault=("F.cross_entropy(output, labels)", "-F.cross_entropy(output, labels)"))
    def loss_rewards_wrong(x: Examination, better: Outcome) -> Finding:
        ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from rankscope._registry import Registry
from rankscope.examination.findings import NOT_MADE, Finding, CarriedOut, told

if TYPE_CHECKING:
    from rankscope.examination.outcomes import Outcome
    from rankscope.examination.passes import Examination
    from rankscope.examination.rows.programs import Script

Need = Literal["structure", "loss", "labels", "optimizer"]
Level = Literal["fault", "note", "preview"]
"""What a row may claim: a fault if it accuses no healthy program, a note if it names an effect without blame, and
nothing yet while it is a preview."""
Read = Callable[["Examination", "Outcome"], Finding | None]


@dataclass(frozen=True)
class RowSpec:
    """A row: a function of an examination and an outcome, and the facts that the verb, the tests and the page use.

    Attributes:
        code: name of the function.
        title: first line of its docstring.
        reads: name of the outcome, which must be shown; see :mod:`rankscope.examination.outcomes`.
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
    reads: str
    order: int
    read: Read
    bad: Script
    good: Script
    needs: frozenset[Need]
    level: Level
    despite: frozenset[str]

    def look(self, x: Examination) -> Finding | None:
        """What it finds, under its name."""
        outcome = x.outcome(self.reads)
        found = self.read(x, outcome) if outcome.shown else None
        if found is None:
            return None
        return replace(found, code=self.code, kind="note" if self.level == "note" else found.kind)


__all__ = ["ROWS", "Finding", "RowSpec", "finding", "row", "told"]

ROWS: Registry[RowSpec] = Registry("row", f"{__package__}.rows")


def row(
    reads: str,
    *,
    order: int,
    good: Script,
    fault: tuple[str, ...],
    level: Level = "fault",
    needs: frozenset[Need] | set[Need] = frozenset(),
    despite: frozenset[str] | set[str] = frozenset(),
) -> Callable[[Read], Read]:
    """Register a function of an examination and an outcome that returns a finding, or None; see :class:`RowSpec`.

    Args:
        reads: name of the outcome.
        order: its place among the rows.
        good: the smallest program without the fault.
        fault: what to write in it for what, so that it has the fault.
        level: what the row may claim.
        needs: what it cannot be found without.
        despite: codes of earlier faults that leave its measurements as they are.
    """

    def register(read: Read) -> Read:
        title, code = (read.__doc__ or "").strip().split("\n", 1)[0], read.__name__
        bad = good.but(*fault)
        ROWS.add(code, RowSpec(code, title, reads, order, read, bad, good, frozenset(needs), level, frozenset(despite)))
        return read

    return register


def finding(
    sentence: str,
    hint: str = "",
    made: CarriedOut = NOT_MADE,
    *,
    why: str = "",
    evidence: tuple[str, float] | tuple[str, float, float | None, str] = ("", 0.0),
    **facts: Any,
) -> Finding:
    """What a row returns.

    Args:
        sentence: what is wrong.
        hint: what to change, in words.
        made: the change that was carried out on a copy and helped, which is said in place of the hint.
        why: what is said after such a change.
        evidence: what was measured, the number as the model is, the number with an intervention, and which that was.
        facts: other fields of a finding.
    """
    change = made.text + why if made.text else hint
    numbers = dict(zip(("measured", "before", "after", "intervention"), evidence if evidence[0] else (), strict=False))
    return Finding("", sentence, change, tried=bool(made.text), edits=made.edits, **numbers, **facts)  # type: ignore[arg-type]
