"""Remedies ranked by the trainings they rescued and by what they do to the tokens, and the sentence about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rankscope.runs.curves import curve, names_in
from rankscope.runs.rows import of_stack, only
from rankscope.runs.summary import stacks_of
from rankscope.verdicts.battery import residual_battery
from rankscope.verdicts.reading import read_stack
from rankscope.verdicts.sentences import short
from rankscope.verdicts.states import State
from rankscope.verdicts.verdict import Verdict

NONE = "none"


def ranked(table: pa.Table, facts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per remedy, best first; without a rank if the model is healthy as it is.

    Remedies that rescued trainings of networks arranged like this one come first, by the share they rescued, then those
    without such evidence and the model without a remedy, then those that were tried in training and never helped; each
    group by how far tokens stay apart.

    Of a model with several stacks the one whose tokens are closest together without a remedy is shown. Each entry has
    the relative residual and the mean cosine by block, the factor per block of the former, and of the gradients the
    geometric mean over blocks of (query + key) / (2 value).
    """
    stack = _worst_stack(table)
    entries = [{**fact, **_curves(_of(table, str(fact["name"]), stack)), "stack": stack} for fact in facts]
    for entry in entries:
        entry["qk_over_v"] = _ratio([norm for norm in entry["gradients"] if norm["stack"] == stack])
    entries.sort(key=lambda entry: (*_by_training(entry), -or_zero(entry["residual_last"])))
    healthy = is_healthy(entries)
    for position, entry in enumerate(entries):
        entry["rank"] = None if healthy else position + 1
    return entries


def is_healthy(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the model needs no remedy, so that nothing is ranked."""
    return state_of(next(entry for entry in entries if entry["name"] == NONE)) == State.HEALTHY


def _by_training(entry: Mapping[str, Any]) -> tuple[int, float]:
    """Group and place in it: rescued some, not tried in training, rescued none.

    A remedy of strength 0 switches branches off, so that tokens stay as they came: without a training that it rescued,
    that says nothing for it.
    """
    seen = entry.get("trained")
    if seen is None:
        return (2 if entry.get("strength") == 0.0 else 1), 0.0
    return (0, -seen["rescued"] / seen["trained"]) if seen["rescued"] else (2, 0.0)


def never_helped(entry: Mapping[str, Any]) -> bool:
    """Whether the remedy was tried in training networks like this one and rescued none."""
    return _by_training(entry)[0] == 2


def _of(table: pa.Table, remedy: str, stack: str | None) -> pa.Table:
    return of_stack(only(table, remedy=remedy), stack)


def _worst_stack(table: pa.Table) -> str | None:
    untreated = _of(table, NONE, None)
    ends = {stack: or_zero(_curves(_of(untreated, NONE, stack))["residual_last"]) for stack in stacks_of(untreated)}
    return min(ends, key=lambda stack: ends[stack])


def _curves(rows: pa.Table) -> dict[str, Any]:
    entry = curve(rows, "relative_residual", "block.in")
    residual = curve(rows, "relative_residual", "block.out")
    both = np.concatenate([entry.mean[:1], residual.mean])
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = both[1:] / both[:-1]
        factor = float((both[-1] / both[0]) ** (1 / residual.mean.size))
    return {
        "residual": [_plain(value) for value in both],
        "residual_last": _plain(both[-1]),
        "at_floor": bool(residual.any_floor[-1]),
        "factors": [_plain(value) for value in factors],
        "factor": _plain(factor),
        **{f"{name}_last": _last(rows, name) for name in ("mean_cosine", "correlation", "stable_rank")},
    }


def _last(rows: pa.Table, metric: str) -> float | None:
    if metric not in names_in(rows, "metric"):
        return None
    return _plain(curve(rows, metric, "block.out").mean[-1])


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def or_zero(value: float | None) -> float:
    """A residual that is undefined (the forward pass overflowed) ranks last."""
    return 0.0 if value is None else value


def _ratio(norms: Sequence[Mapping[str, float]]) -> float | None:
    """Geometric mean over blocks; None where a gradient is zero or not finite, so that there is no ratio."""
    logs = []
    for norm in norms:
        top, bottom = (norm["query"] + norm["key"]) / 2, norm["value"]
        if not (math.isfinite(top) and math.isfinite(bottom) and top > 0 and bottom > 0):
            return None
        logs.append(math.log(top) - math.log(bottom))
    return math.exp(sum(logs) / len(logs)) if logs else None


NOTICEABLE = 1.1
"""A relative residual is called higher when it is at least a tenth higher."""


def judge_remedies(entries: Sequence[Mapping[str, Any]], sequences: int, *, is_random: bool) -> Verdict:
    """What was seen, in sentences, with the numbers they rest on. Heuristic: a tenth counts as a difference."""
    none = next(entry for entry in entries if entry["name"] == NONE)
    others = [entry for entry in entries if entry["name"] != NONE]
    before, state = or_zero(none["residual_last"]), state_of(none)
    apart = [
        entry for entry in others if or_zero(entry["residual_last"]) >= NOTICEABLE * before and not entry["at_floor"]
    ]
    higher = [entry for entry in apart if not never_helped(entry)]
    lower = [entry for entry in others if or_zero(entry["residual_last"]) < before / NOTICEABLE]
    ends = [f"{_words(none['residual_last'])} without a remedy"]
    if state == State.HEALTHY:
        parts = [f"No remedy needed: tokens stay apart, and none of the {len(others)} is ranked"]
    elif higher:
        best = higher[0]
        parts = [f"{len(higher)} of {len(others)} remedies help. First: {', '.join(one['name'] for one in higher[:3])}"]
        if best.get("trained"):
            parts.append(f"{best['name']} {best['trained']['words']}")
        ends = [f"{_words(best['residual_last'])} with {best['name']}", *ends]
        still = sum(state_of(entry) >= State.COLLAPSING for entry in higher)
        parts += [f"With {still} of these, tokens still collapse"] if still else []
    else:
        parts = [f"No remedy to suggest: none of {len(others)} helps" if not apart else "No remedy to suggest"]
    ends[-1] += "" if state == State.HEALTHY else f" ({state.code})"
    parts.append(f"Relative residual after {len(none['factors'])} blocks: {', '.join(ends)}")
    parts += ["At the float floor the gain cannot be quantified"] if none["at_floor"] else []
    if len(apart) > len(higher) and state != State.HEALTHY:
        names = ", ".join(entry["name"] for entry in apart if never_helped(entry))
        parts.append(f"Not suggested, because they rescued no training of such networks: {names}")
    if lower:
        parts.append(f"{len(lower)} bring tokens closer together: {', '.join(entry['name'] for entry in lower[:4])}")
    parts += _gradient_words(none, higher) if state != State.HEALTHY else []
    weights = "one random initialisation" if is_random else "the given weights"
    basis = f"{weights}, {sequences} sequence{'s' if sequences != 1 else ''} and no training"
    verdict = f"{'. '.join(parts)}. Based on {basis}, so it does not show which remedy trains best."
    keys = ("name", "residual_last", "mean_cosine_last", "factor", "qk_over_v", "parameters")
    evidence = tuple({**{key: entry[key] for key in keys}, "state": state_of(entry).code} for entry in entries)
    return Verdict(verdict, evidence, state.code)


def state_of(entry: Mapping[str, Any]) -> State:
    """The state of one network of the comparison, by its relative residuals."""
    line = np.array([[math.nan if value is None else value] for value in entry["residual"][1:]])
    floor = np.zeros(line.shape, dtype=np.bool_)
    floor[-1] = entry["at_floor"]
    return read_stack(residual_battery(range(len(line)), line, floor=floor)).state


def _gradient_words(none: Mapping[str, Any], higher: Sequence[Mapping[str, Any]]) -> list[str]:
    known = [entry for entry in higher[:1] if entry["qk_over_v"] is not None]
    if none["qk_over_v"] is None or not known:
        return []
    after = f"{short(known[0]['qk_over_v'])} with {known[0]['name']}, {short(none['qk_over_v'])} without"
    return [f"Gradients of queries and keys over those of values: {after}"]


def _words(value: float | None) -> str:
    return "undefined" if value is None else short(value)
