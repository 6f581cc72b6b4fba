"""The declaration of a row.

A row reads outcomes of experiments and is asked only if all of them are shown. It is declared beside its smallest bad
and good program, which are its test and its page (``rankscope doctor --explain CODE``)::

    @row(reads=("wrong_is_better",), order=50, needs={"loss", "labels"}, bad=negated, good=plain)
    def loss_rewards_wrong(x: Examination, better: Outcome) -> Finding:
        ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rankscope._registry import Registry
from rankscope.examination.findings import Finding, told

if TYPE_CHECKING:
    from rankscope.examination.passes import Examination
    from rankscope.examination.rows.programs import Program

Need = Literal["structure", "loss", "labels", "optimizer"]
Level = Literal["fault", "note", "preview"]
"""What a row may claim: a fault if it accuses no healthy program, a note if it names an effect without blame, and
nothing yet while it is a preview."""


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


__all__ = ["ROWS", "Finding", "RowSpec", "row", "told"]

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
