"""How each state of a verdict is shown: its tone, and a few words."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope.runs.run import Run

STATES: Mapping[str, tuple[str, str]] = {
    "healthy": ("good", "no collapse"),
    "mean offset": ("care", "a common vector"),
    "few directions": ("care", "few directions"),
    "huge channel": ("care", "one huge channel"),
    "huge token": ("care", "one huge token"),
    "clusters": ("care", "clusters of copies"),
    "same direction": ("care", "one common direction"),
    "copies": ("bad", "most tokens copies"),
    "collapsing": ("bad", "collapsing"),
    "floor": ("floor", "at the float floor"),
    "collapsed": ("bad", "collapsed"),
    "vanished": ("bad", "exactly zero"),
    "not finite": ("bad", "not finite"),
}
"""Tone and words of a verdict's code, milder to graver."""


def state_of(run: Run) -> tuple[str, str]:
    """Tone and words for the verdict's code, or for the gravest state in the evidence if the run has no code."""
    if run.code is not None:
        return STATES.get(run.code, ("plain", ""))
    codes = {str(item.get("code")) for item in run.evidence}
    known = [code for code in STATES if code in codes]
    return STATES[known[-1]] if known else ("plain", "")
