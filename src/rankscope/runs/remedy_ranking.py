"""What each remedy did, from the rows: curves, factors and a rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rankscope.runs.curves import curve, names_in
from rankscope.runs.rows import of_stack, only
from rankscope.runs.summary import stacks_of

NONE = "none"


def ranked(table: pa.Table, facts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per remedy, the one that keeps tokens furthest apart first.

    Of a model with several stacks the one whose tokens are closest together without a remedy is shown. Each entry has
    the relative residual and the mean cosine by block, the factor per block of the former, and of the gradients the
    geometric mean over blocks of (query + key) / (2 value).
    """
    stack = _worst_stack(table)
    entries = [{**fact, **_curves(_of(table, str(fact["name"]), stack)), "stack": stack} for fact in facts]
    for entry in entries:
        entry["qk_over_v"] = _ratio([norm for norm in entry["gradients"] if norm["stack"] == stack])
    entries.sort(key=lambda entry: -or_zero(entry["residual_last"]))
    for position, entry in enumerate(entries):
        entry["rank"] = position + 1
    return entries


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
