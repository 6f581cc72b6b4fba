"""The axes along which a model can collapse, other than the tokens of one sequence, and how a verdict names several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rankscope.runs._frozen import freeze, thaw
from rankscope.verdicts.sentences import say
from rankscope.verdicts.states import State
from rankscope.verdicts.verdict import Verdict

AXES: Mapping[str, str] = {
    "tokens": "the tokens of one sequence become alike",
    "inputs": "different inputs get the same representation",
    "streams": "the residual streams of one token become alike",
    "experts": "the router uses few of the experts",
    "attention": "heads weight all tokens equally, or pick one",
    "depth": "blocks leave the stream as it is",
}
"""What collapses along each axis."""

ALARMING = frozenset({State.COLLAPSED.code, State.FLOOR.code, State.VANISHED.code, State.NOT_FINITE.code})
"""Codes that a headline names."""


@dataclass(frozen=True)
class AxisFinding:
    """What was found along one axis.

    Args:
        axis: a key of :data:`AXES`.
        code: that of a :class:`State`.
        sentence: what was found, with its values; may be empty.
        evidence: those values, in the form of a verdict's evidence.
        next_steps: commands worth running next.
        is_usual_at_first: whether a random initialisation is usually in this state; a headline does not name it then.
        details: what it means, and further values.
    """

    axis: str
    code: str
    sentence: str
    evidence: tuple[Mapping[str, Any], ...] = ()
    next_steps: tuple[str, ...] = ()
    is_usual_at_first: bool = False
    details: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "evidence", freeze(self.evidence))

    def to_json(self) -> dict[str, Any]:
        """The entry of a run's ``axes``."""
        return {
            "axis": self.axis,
            "code": self.code,
            "sentence": self.sentence,
            "evidence": thaw(self.evidence),
            "next_steps": list(self.next_steps),
        }


def across_axes(tokens: Verdict, findings: Iterable[AxisFinding]) -> Verdict:
    """The verdict on the tokens with the findings along other axes after it; its code remains that of the tokens.

    Each axis has a line. Lines of axes that collapsed come first, then those that are collapsing. If a collapse was
    found along another axis than tokens, the first line says along which axes the model collapsed and along which not.

    Example:
        >>> tokens = Verdict("No collapse.", (), "healthy")
        >>> found = AxisFinding("inputs", "collapsed", "Between inputs: all inputs look the same.")
        >>> print(across_axes(tokens, [found]))
        Collapsed along inputs, not tokens.
        Between inputs: all inputs look the same.
        Tokens: No collapse.
    """
    findings = list(findings)
    if not findings:
        return tokens
    lines = [("tokens", tokens.code, tokens.sentence), *((one.axis, one.code, one.sentence) for one in findings)]
    codes = {"tokens": tokens.code} | {one.axis: one.code for one in findings if not one.is_usual_at_first}
    alarming = [axis for axis, code in codes.items() if code in ALARMING]
    falling = [axis for axis, code in codes.items() if code == State.COLLAPSING.code]
    if any(axis != "tokens" for axis in (*alarming, *falling)):
        lines[0] = ("tokens", tokens.code, f"Tokens: {tokens.sentence}")
        lines.sort(key=lambda line: 0 if line[0] in alarming else 1 if line[0] in falling else 2)
    if any(axis != "tokens" for axis in alarming):
        others = [axis for axis, code in codes.items() if axis not in alarming and code != State.UNKNOWN.code]
        rest = f", not {' or '.join(others)}" if others else ""
        lines.insert(0, ("", None, say("axes", axes=" and ".join(alarming), rest=rest)))
    steps = [*tokens.next_steps, *(step for finding in findings for step in finding.next_steps)]
    return replace(
        tokens,
        sentence="\n".join(sentence for _, _, sentence in lines if sentence),
        evidence=(*tokens.evidence, *({"axis": one.axis, **item} for one in findings for item in one.evidence)),
        next_steps=tuple(dict.fromkeys(steps))[:3],
        axes=tuple(finding.to_json() for finding in findings),
        details="\n".join(filter(None, [tokens.details, *(finding.details for finding in findings)])),
    )
