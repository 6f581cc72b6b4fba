"""The sentence about a comparison of remedies; it does not oversell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankscope.runs.remedy_ranking import NONE, or_zero
from rankscope.verdicts.battery import residual_battery
from rankscope.verdicts.reading import read
from rankscope.verdicts.states import State
from rankscope.verdicts.verdict import Verdict
from rankscope.views import number

NOTICEABLE = 1.1
"""A relative residual is called higher when it is at least a tenth higher."""


def judge_remedies(
    entries: Sequence[Mapping[str, Any]], floor: float | None, sequences: int, *, is_random: bool
) -> Verdict:
    """What was seen, in sentences, with the numbers they rest on. Heuristic: a tenth counts as a difference."""
    none = next(entry for entry in entries if entry["name"] == NONE)
    others = [entry for entry in entries if entry["name"] != NONE]
    before, state = or_zero(none["residual_last"]), state_of(none)
    blocks = len(none["factors"])
    parts = [
        f"without a remedy the relative residual is {_words(none['residual_last'])} after {blocks} blocks "
        f"({state.code}; mean cosine {_words(none['mean_cosine_last'])}, factor per block {_words(none['factor'])})"
    ]
    if none["at_floor"]:
        parts[0] += ", at the float floor: by how much a remedy improves on it cannot be told"
    higher = [
        entry for entry in others if or_zero(entry["residual_last"]) >= NOTICEABLE * before and not entry["at_floor"]
    ]
    lower = [entry for entry in others if or_zero(entry["residual_last"]) < before / NOTICEABLE]
    if higher:
        best = ", ".join(f"{entry['name']} ({number(entry['residual_last'])})" for entry in higher[:3])
        still = sum(state_of(entry) >= State.COLLAPSING for entry in higher)
        most = f"; with {still} of them they collapse nevertheless" if still else ""
        parts.append(f"{len(higher)} of {len(others)} remedies keep tokens further apart, most of all {best}{most}")
    else:
        parts.append(f"none of {len(others)} remedies keeps tokens noticeably further apart")
    if lower:
        parts.append(f"{len(lower)} bring them closer: {', '.join(entry['name'] for entry in lower[:4])}")
    parts += _gradient_words(none, higher)
    weights = "one random initialisation" if is_random else "the given weights, as they are"
    basis = f"{weights}, {sequences} sequence{'s' if sequences != 1 else ''}, no training: this is what happens to "
    sentence = "; ".join(parts)
    verdict = f"{sentence[0].upper()}{sentence[1:]}. It rests on {basis}tokens here, not which remedy trains best."
    keys = ("name", "residual_last", "mean_cosine_last", "factor", "qk_over_v", "parameters", "time_ratio")
    evidence = tuple({**{key: entry[key] for key in keys}, "state": state_of(entry).code} for entry in entries)
    return Verdict(verdict, evidence, state.code)


def state_of(entry: Mapping[str, Any]) -> State:
    """The state of one network of the comparison, by its relative residuals."""
    line = np.array([[math.nan if value is None else value] for value in entry["residual"][1:]])
    floor = np.zeros(line.shape, dtype=np.bool_)
    floor[-1] = entry["at_floor"]
    return read(residual_battery(range(len(line)), line, floor=floor), None, {}).state


def _gradient_words(none: Mapping[str, Any], higher: Sequence[Mapping[str, Any]]) -> list[str]:
    known = [entry for entry in higher[:3] if entry["qk_over_v"] is not None]
    if none["qk_over_v"] is None or not known:
        return []
    after = ", ".join(f"{number(entry['qk_over_v'])} under {entry['name']}" for entry in known)
    return [f"gradients of query and key weights over those of values are {number(none['qk_over_v'])} without, {after}"]


def _words(value: float | None) -> str:
    return "undefined" if value is None else number(value)
