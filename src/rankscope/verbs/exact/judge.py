"""What an exact run says: the state of its residuals, the order, and where each float format stops seeing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rankscope._types import Status
from rankscope.runs.curves import Curve, cells, curve, names_in
from rankscope.runs.not_finite import CODE, first_not_finite
from rankscope.runs.rows import of_stack, only
from rankscope.runs.summary import stacks_of
from rankscope.verdicts.battery import Battery, Floats, residual_battery
from rankscope.verdicts.reading import StackReading, read_stack, span_of
from rankscope.verdicts.sentences import in_words
from rankscope.verdicts.states import State
from rankscope.verdicts.verdict import Verdict, not_finite, steps_for

SMALL = -3.0
"""log10 of the relative residual below which the leading term dominates, so that order and factor have their meaning.
Not a threshold of collapse, which is reached before."""
NEAR = 0.05
"""How near a block's order must come to 3 or 1 to be called that."""


SPARE = -6.0
"""log10 of the relative residual above which a float64 pass has at least nine digits of it."""
AGREEMENT = 1e-4
"""By how much log10 of the residual may differ between exact and float64 arithmetic above :data:`SPARE`."""


def exact_curves(table: pa.Table, metric: str, stack: str | None, site: str = "block.out") -> dict[str, Curve]:
    """``metric`` over depth for each arithmetic that has it."""
    rows = only(table, metric=metric)
    curves = {}
    for arithmetic in names_in(rows, "arithmetic"):
        mine = of_stack(only(rows, arithmetic=arithmetic), stack)
        if site in names_in(mine, "site"):
            curves[arithmetic] = curve(mine, metric, site)
    return curves


def cross_checked(table: pa.Table) -> tuple[pa.Table, tuple[str, ...]]:
    """Compare exact residuals with those of a plain float64 pass where float64 has digits to spare.

    If the two disagree, one of them is wrong, and the exact values of that sequence are marked from that block on.

    Returns:
        The table, and a note per stack in which something was marked.
    """
    rows = table.select(["metric", "site", "stack", "layer", "sequence", "arithmetic", "value", "status"]).to_pylist()
    places: dict[tuple[str | None, int], dict[int, dict[str, int]]] = {}
    for number, row in enumerate(rows):
        if row["metric"] == "log10_relative_residual" and row["site"] == "block.out" and row["status"] == Status.OK:
            by_arithmetic = places.setdefault((row["stack"], row["sequence"]), {}).setdefault(row["layer"], {})
            by_arithmetic[row["arithmetic"]] = number
    first: dict[tuple[str | None, int], int] = {}
    notes: dict[str | None, str] = {}
    for (stack, sequence), layers in places.items():
        for layer in sorted(layers):
            exact, plain = (layers[layer].get(name) for name in ("exact", "float64"))
            if exact is None or plain is None:
                continue
            ours, theirs = rows[exact]["value"], rows[plain]["value"]
            if theirs > SPARE and not abs(ours - theirs) <= AGREEMENT:
                first[stack, sequence] = layer
                notes.setdefault(
                    stack,
                    f"exact and float64 arithmetic disagree at block {layer}{f' of the {stack}' if stack else ''} "
                    f"(relative residual 10^{ours:.4f} and 10^{theirs:.4f}, sequence {sequence}): the exact values "
                    "are marked from there on. This is a defect of rankscope; please report the model.",
                )
                break
    if not first:
        return table, ()
    statuses = [
        str(Status.FLOOR)
        if row["arithmetic"] == "exact"
        and row["site"] == "block.out"
        and row["status"] == Status.OK
        and row["layer"] >= first.get((row["stack"], row["sequence"]), row["layer"] + 1)
        else row["status"]
        for row in rows
    ]
    column = table.schema.get_field_index("status")
    marked = pa.array(statuses).cast(pa.string())
    kind = table.schema.field(column).type
    marked = marked.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else marked
    return table.set_column(column, table.schema.field(column), marked), tuple(notes.values())


def orders_of(table: pa.Table, stack: str | None) -> tuple[dict[int | None, list[int]], float]:
    """The blocks of each order (3, 1, or None for another one) in the collapsed part, and the last factor there.

    Blocks in which exact arithmetic ran out of digits do not count. Blocks are given by their place among all.
    """
    relative = exact_curves(table, "log10_relative_residual", stack)["exact"]
    orders = exact_curves(table, "order", stack)["exact"]
    factors = exact_curves(table, "factor", stack)["exact"]
    small = np.isfinite(orders.mean) & (relative.mean < SMALL) & ~orders.any_floor
    layers_by_order: dict[int | None, list[int]] = {}
    for place in np.flatnonzero(small).tolist():
        near = next((whole for whole in (3, 1) if abs(orders.mean[place] - whole) < NEAR), None)
        layers_by_order.setdefault(near, []).append(place)
    return layers_by_order, float(factors.mean[np.flatnonzero(small)[-1]]) if small.any() else math.nan


def order_of(table: pa.Table, stack: str | None) -> int | None:
    """The order that all blocks of the collapsed part have, 3 or 1; None if they differ or there are none."""
    orders, _ = orders_of(table, stack)
    return next(iter(orders)) if len(orders) == 1 else None


LEVEL = 0.05
"""Decades by which two residuals may differ and still be called equal: they then read the same to one digit."""


def judge_exact(table: pa.Table, floors: Mapping[str, float], model: str | None = None) -> Verdict:
    """One sentence per stack: its state, order and residual, and the first block that each dtype cannot resolve.

    NaN and infinity in exact arithmetic are reported before anything else.
    """
    sentences: list[str] = []
    evidence: list[dict[str, Any]] = []
    readings: list[StackReading] = []
    stacks = stacks_of(table)
    for stack in stacks:
        prefix = f"{str(stack).capitalize()}: " if len(stacks) > 1 else ""
        battery, logs = _battery(table, stack)
        reading = read_stack(battery)
        readings.append(reading)
        sentences.append(prefix + _sentence(table, stack, floors, reading, logs))
        state = {"code": reading.state.code, "site": "block.out", "stack": stack}
        evidence += [{**state, **item} for item in _evidence(table, stack)] or [state]
    gravest = max(readings, key=lambda reading: reading.state)
    steps = (f"rankscope remedy {model or 'MODEL'}",) if gravest.state >= State.COLLAPSING else ()
    lost = first_not_finite(only(table, arithmetic="exact"))
    if lost is not None:
        words = not_finite(lost, None if gravest.state is State.UNKNOWN else gravest)
        return Verdict(words, (lost.evidence(), *evidence), CODE, steps_for(State.NOT_FINITE, model))
    return Verdict(" ".join(sentences), tuple(evidence), gravest.state.code, steps)


def _battery(table: pa.Table, stack: str | None) -> tuple[Battery, Floats]:
    """Relative residuals of the exact arithmetic, and their log10, by layer and sequence.

    The logarithm of an exact zero is -inf, with status ok.
    """
    exact = of_stack(only(table, arithmetic="exact"), stack)
    relative, absolute = (cells(exact, metric, "block.out") for metric in ("log10_relative_residual", "log10_residual"))
    with np.errstate(under="ignore"):
        battery = residual_battery(relative.layers, np.power(10.0, relative.values), metric="log10_relative_residual")
    # A residual of zero that is undefined relative to the norm: the stream itself is zero.
    return replace(battery, vanished=np.isneginf(absolute.values) & relative.undefined), relative.values


def _sentence(
    table: pa.Table, stack: str | None, floors: Mapping[str, float], reading: StackReading, logs: Floats
) -> str:
    """The state and its order, the residual after the last and the first block, and what floats cannot resolve."""
    layers = reading.battery.layers
    if reading.state is State.UNKNOWN:
        return "No verdict: the relative residual is undefined after every block."
    if reading.state is State.VANISHED:
        return f"Vanished {reading.where()}: the stream is exactly zero."
    numbers, fall = _course(table, stack, layers, logs)
    if reading.state is State.COLLAPSED:
        span = reading.span(State.COLLAPSED)
        words = f"Collapsed {reading.where()}{_order_words(*orders_of(table, stack), layers, span)}."
    elif reading.state is State.COLLAPSING:
        words = f"{in_words(reading).capitalize()}."
    else:
        words = "No collapse." if fall < LEVEL else "No collapse yet."
    # Exact zeros are counted by sequence, because one of them has no logarithm to average.
    equal = np.isneginf(logs)
    if equal.any():
        count = int(equal.any(axis=0).sum())
        whose = "" if count == logs.shape[1] else f" in {count} of {logs.shape[1]} sequences"
        numbers += f" After block {layers[equal.any(axis=1)][0]} the tokens are exactly equal{whose}."
    seen = _stops_seeing(layers, logs, floors, exact_curves(table, "log10_relative_residual", stack))
    return f"{words} {numbers} {seen}"


def _order_words(found: Mapping[int | None, list[int]], factor: float, layers: NDArray[np.int64], said: str) -> str:
    """The order of the blocks below :data:`SMALL`; which blocks have it, unless all do or ``said`` names them."""
    does = {
        3: "each block cubes the distance between tokens (order 3)",
        1: f"each block multiplies the distance between tokens, by {factor:.4g} late in depth (order 1)",
        None: "no constant order",
    }
    if len(found) == 1:
        (order, places), *_ = found.items()
        span = span_of(places, layers)
        return f": {does[order]}" if span == said else f": {span}, {does[order]}"
    parts = [f"{'another order' if o is None else f'order {o}'} {span_of(p, layers)}" for o, p in found.items()]
    return f": {', '.join(parts)}" if parts else ""


def _course(table: pa.Table, stack: str | None, layers: NDArray[np.int64], logs: Floats) -> tuple[str, float]:
    """The relative residual after the last and the first block, and by how many decades it fell.

    Values that ran out of digits are not quoted: the last one that did not takes the place of the last.
    """
    first, last, at = _mean(logs[0]), _mean(logs[-1]), len(layers) - 1
    line = exact_curves(table, "log10_residual", stack)["exact"]
    marked = dict(zip(line.layers.tolist(), line.any_floor.tolist(), strict=True))
    lost = [row for row, layer in enumerate(layers.tolist()) if marked.get(layer)]
    known = [row for row in range(len(layers)) if row not in lost and not math.isnan(_mean(logs[row]))]
    if lost and not known:
        return f"Residual unknown: exact arithmetic ran out of digits in block {layers[lost[0]]}.", 0.0
    more = ""
    if lost and known[-1] < lost[-1]:
        at, more = known[-1], f" Exact arithmetic ran out of digits in block {layers[lost[0]]} (values marked *)."
    elif math.isnan(last):
        at, more = known[-1], " It is undefined after the last block."
    last = _mean(logs[at])
    numbers = f"Relative residual {_power(last)} after block {layers[at]}"
    if math.isnan(first) or at == 0 or first == last or 0 in lost:
        return f"{numbers}.{more}", 0.0
    return f"{numbers}, {_power(first)} after block {layers[0]}.{more}", first - last


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


def _stops_seeing(
    layers: NDArray[np.int64], logs: Floats, floors: Mapping[str, float], measured: Mapping[str, Curve]
) -> str:
    """The first block that each format cannot resolve: below its floor, or without a value in its own pass.

    Tokens may differ well above the floor and be lost all the same, because their size underflows or overflows.
    """
    words = []
    for name, floor in floors.items():
        below = (logs <= np.log10(floor)).sum(axis=1)
        lost = {int(layer): int(count) for layer, count in zip(layers, below, strict=True) if count}
        if (own := measured.get(name)) is not None:
            known = own.layers[np.isfinite(own.mean) | own.any_floor].tolist()
            lost |= dict.fromkeys(set(layers[~np.isnan(logs).all(axis=1)].tolist()) - set(known), logs.shape[1])
        first = min(lost, default=None)
        some = (
            "" if first is None or lost[first] == logs.shape[1] else f" in {lost[first]} of {logs.shape[1]} sequences"
        )
        words.append(f"{name} resolves every block" if first is None else f"{name} cannot resolve block {first}{some}")
    return "; ".join(words) + "."


def _evidence(table: pa.Table, stack: str | None) -> Iterator[dict[str, Any]]:
    for metric in ("log10_residual", "log10_relative_residual", "order", "factor"):
        line = exact_curves(table, metric, stack).get("exact")
        if line is not None and np.isfinite(line.mean[-1]):
            layer, value = int(line.layers[-1]), float(line.mean[-1])
            yield {"metric": metric, "layer": layer, "value": value}
