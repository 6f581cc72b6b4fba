"""What is found; without torch, because whatever prints a finding needs none."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from rankscope._printing import brief


@dataclass(frozen=True)
class FileEdit:
    """An edit that a program can carry out: in a function of a file, every ``old`` becomes ``new``.

    An empty ``new`` removes the statement.
    """

    file: str
    function: str
    old: str
    new: str


class CarriedOut(NamedTuple):
    """A change that was carried out on a copy and helped, as a sentence and as data; empty if none was or did."""

    text: str = ""
    edits: tuple[FileEdit, ...] = ()


NOT_MADE = CarriedOut()


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
