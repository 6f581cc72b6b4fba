"""The sentence about an exact run: the state of its residuals, the order, and where each float format stops seeing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope._types import Status
from rankscope.runs.exactness import exact_curves, order_of
from rankscope.runs.summary import stacks_of
from rankscope.verdicts.battery import Battery, Flags, Floats, residual_battery
from rankscope.verdicts.reading import Reading, read
from rankscope.verdicts.sentences import in_words
from rankscope.verdicts.states import State
from rankscope.verdicts.verdict import Verdict

LEVEL = 0.05
"""Decades by which two residuals may differ and still be called equal: they then read the same to one digit."""


def judge_exact(table: pa.Table, floors: Mapping[str, float], model: str | None = None) -> Verdict:
    """One sentence per stack: its state, the order, how small the residual becomes, and where formats stop seeing."""
    sentences, evidence, states = [], [], []
    stacks = stacks_of(table)
    for stack in stacks:
        prefix = f"{str(stack).capitalize()}: " if len(stacks) > 1 else ""
        battery, logs = _battery(table, stack)
        reading = read(battery, None, {})
        states.append(reading.state)
        sentences.append(prefix + _sentence(table, stack, floors, reading, logs))
        state = {"code": reading.state.code, "site": "block.out", "stack": stack}
        evidence += [{**state, **item} for item in _evidence(table, stack)] or [state]
    gravest = max(states)
    steps = (f"rankscope remedy {model or 'MODEL'}",) if gravest >= State.COLLAPSING else ()
    return Verdict(" ".join(sentences), tuple(evidence), gravest.code, steps)


def _battery(table: pa.Table, stack: str | None) -> tuple[Battery, Floats]:
    """Relative residuals of the exact arithmetic, and their log10, by layer and sequence.

    The logarithm of an exact zero is -inf, with status ok.
    """
    layers, relative, undefined = _grid(table, stack, "log10_relative_residual")
    _, absolute, _ = _grid(table, stack, "log10_residual")
    with np.errstate(under="ignore"):
        battery = residual_battery(layers, np.power(10.0, relative), metric="log10_relative_residual")
    # A residual of zero that is undefined relative to the norm: the stream itself is zero.
    return replace(battery, vanished=np.isneginf(absolute) & undefined), relative


def _grid(table: pa.Table, stack: str | None, metric: str) -> tuple[NDArray[np.int64], Floats, Flags]:
    keep = pc.and_(pc.equal(table["metric"], metric), pc.equal(table["site"], "block.out"))
    keep = pc.and_(keep, pc.fill_null(pc.equal(table["arithmetic"], "exact"), False))
    if stack is not None:
        keep = pc.and_(keep, pc.fill_null(pc.equal(table["stack"], stack), False))
    rows = table.filter(keep)
    layers, row = np.unique(rows["layer"].to_numpy(), return_inverse=True)
    sequences, column = np.unique(rows["sequence"].to_numpy(), return_inverse=True)
    values = np.full((layers.size, sequences.size), np.nan)
    undefined = np.zeros(values.shape, dtype=np.bool_)
    statuses = rows["status"].to_pylist()
    known = np.array([status in (str(Status.OK), str(Status.FLOOR)) for status in statuses], dtype=np.bool_)
    values[row[known], column[known]] = rows["value"].to_numpy()[known]
    undefined[row[~known], column[~known]] = True
    return layers, values, undefined


def _sentence(table: pa.Table, stack: str | None, floors: Mapping[str, float], reading: Reading, logs: Floats) -> str:
    layers = reading.battery.layers
    seen = _stops_seeing(layers, logs, floors)
    count = f" {reading.count().rstrip()}" if reading.count() else ""
    if reading.state is State.UNKNOWN:
        return "No verdict: the relative residual is undefined after every block."
    if reading.state is State.VANISHED:
        span = reading.span(State.VANISHED)
        return f"Vanished{count}: the stream is exactly zero {span}, so that no relative residual is defined there."
    end, fall = _course(table, stack, layers, logs)
    order, factor = order_of(table, stack)
    if reading.state is State.COLLAPSED:
        where = f"{count} {reading.span(State.COLLAPSED)}{_order_words(order, factor)}"
        return f"Collapsed{where}; {end}.{_zero_words(layers, logs)} {seen}"
    if reading.state is State.COLLAPSING:
        words = in_words(reading)
        return f"{words[0].upper()}{words[1:]}; {end}. {seen}"
    words = "No collapse" if fall < LEVEL else "No collapse yet"
    return f"{words}: {end}. {seen}"


def _order_words(order: int | None, factor: float) -> str:
    if order == 3:
        return ", order 3: each block cubes the residual"
    if order == 1:
        return f", order 1: each block multiplies the residual, late in depth by {factor:.4g}"
    return ", without a settled order"


def _course(table: pa.Table, stack: str | None, layers: NDArray[np.int64], logs: Floats) -> tuple[str, float]:
    """The relative residual after the last block with the one after the first, and by how many decades it fell.

    Values that ran out of digits are not quoted: the last one that did not takes the place of the last.
    """
    first, last = (_mean(logs[row]) for row in (0, -1))
    line = exact_curves(table, "log10_residual", stack)["exact"]
    size = f" (residual {_power(float(line.mean[-1]))})" if math.isfinite(line.mean[-1]) else ""
    end = f"the relative residual after block {layers[-1]} is {_power(last)}{size}"
    marked = dict(zip(line.layers.tolist(), line.any_floor.tolist(), strict=True))
    lost = [row for row, layer in enumerate(layers.tolist()) if marked.get(layer)]
    known = [row for row in range(len(layers)) if row not in lost and not math.isnan(_mean(logs[row]))]
    if lost and not known:
        return f"by how much is not known: even exact arithmetic ran out of digits in block {layers[lost[0]]}", 0.0
    if lost and known[-1] < lost[-1]:
        last = _mean(logs[known[-1]])
        end = (
            f"the relative residual is {_power(last)} after block {layers[known[-1]]}, and from block "
            f"{layers[lost[0]]} on even exact arithmetic ran out of digits (values marked *)"
        )
    elif math.isnan(last):
        last = _mean(logs[known[-1]])
        end = f"the relative residual is {_power(last)} after block {layers[known[-1]]} and undefined after the last"
    if math.isnan(first) or len(layers) < 2 or first == last or 0 in lost:
        return end, 0.0
    fall = first - last
    if abs(fall) < LEVEL:
        return f"{end}, about what it is after block {layers[0]}", fall
    return f"{end}, {'down' if fall > 0 else 'up'} from {_power(first)} after block {layers[0]}", fall


def _zero_words(layers: NDArray[np.int64], logs: Floats) -> str:
    equal = np.isneginf(logs).any(axis=1)
    if not equal.any():
        return ""
    some = int(np.isneginf(logs).any(axis=0).sum())
    whose = "" if some == logs.shape[1] else f" in {some} of {logs.shape[1]} sequences"
    return f" After block {layers[equal][0]} the tokens are exactly equal{whose}."


def _mean(row: Floats) -> float:
    known = row[~np.isnan(row)]
    if not known.size:
        return math.nan
    return -math.inf if np.isneginf(known).all() else float(known[np.isfinite(known)].mean())


def _power(log10: float) -> str:
    """``10^-3.2``; never ``10^-0.0``, and exact zero as 0."""
    if math.isinf(log10):
        return "0"
    return f"10^{round(log10, 1) + 0.0:.1f}"


def _stops_seeing(layers: NDArray[np.int64], logs: Floats, floors: Mapping[str, float]) -> str:
    words = []
    line = np.array([_mean(row) for row in logs])
    for name, floor in floors.items():
        below = layers[line <= np.log10(floor)]
        words.append(f"{name} stops seeing at block {below[0]}" if below.size else f"{name} sees it all")
    return "; ".join(words) + "."


def _evidence(table: pa.Table, stack: str | None) -> Iterator[dict[str, Any]]:
    for metric in ("log10_residual", "log10_relative_residual", "order", "factor"):
        line = exact_curves(table, metric, stack).get("exact")
        if line is not None and np.isfinite(line.mean[-1]):
            layer, value = int(line.layers[-1]), float(line.mean[-1])
            yield {"metric": metric, "layer": layer, "value": value}
