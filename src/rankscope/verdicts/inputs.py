"""Whether different inputs still have different representations: the battery over pooled inputs, in words."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from rankscope._types import Status
from rankscope.runs.curves import cells
from rankscope.runs.rows import ENTRY, of_stack, only
from rankscope.runs.summary import stacks_of
from rankscope.verdicts.axes import AxisFinding
from rankscope.verdicts.battery import Battery, Flags, Floats, read_battery
from rankscope.verdicts.classifying import classify
from rankscope.verdicts.reading import StackReading, read_stack, span_of
from rankscope.verdicts.sentences import percent
from rankscope.verdicts.states import AVERAGING, COLLAPSED_RESIDUAL, KEPT_SPREAD, LEAST_INPUTS, State
from rankscope.views import number

MEAN, METRIC = "inputs.mean", "relative_residual"
TOKENS_SITE = "block.out"


def inputs_findings(
    table: pa.Table,
    compared: Mapping[str, Any],
    *,
    lengths: Mapping[str | None, Mapping[int, int]],
    floor_relative: float | None,
    model: str | None,
    asked: bool,
) -> list[AxisFinding]:
    """The finding along the axis of inputs; none if there is nothing to say and nobody asked.

    Args:
        table: rows of a run.
        compared: ``extra["between_inputs"]`` of the run.
        lengths: by stack, the number of tokens of each sequence.
        floor_relative: the float floor, to print.
        model: name of the model on the command line, for the next steps.
        asked: whether the caller asked for it, and is told why there is no verdict.
    """
    why = _not_judged(compared)
    if why:
        sentence = f"Between inputs: not judged, because {why}."
        return [AxisFinding("inputs", State.UNKNOWN.code, sentence)] if asked else []
    by_place: list[tuple[State, str, list[dict[str, Any]]]] = []
    for site, pooling in compared["poolings"].items():
        here = only(table, site=site)
        for stack in stacks_of(here) if here.num_rows else []:
            mine = of_stack(here, stack)
            battery = read_battery(mine, lengths={0: compared["inputs"]}, dim=compared["width"], sites=(site,))
            if battery is None or "spread" not in battery.played_by:
                continue
            expected = _averaging(of_stack(table, stack), battery.layers, lengths.get(stack, {}))
            states = classify(battery)
            averaged = np.zeros(states.shape, np.bool_)
            if site == MEAN:
                averaged = (states == State.COLLAPSED) & (battery.spread() >= AVERAGING * expected)
                states[averaged] = int(State.MEAN_OFFSET)
            entry = _at_entry(of_stack(table, stack), site)
            states[_is_kept(battery, states, entry)] = int(State.MEAN_OFFSET)
            met = _met_by_class(battery, states, _class_gaps(compared, site, stack))
            states[met] = int(State.MEAN_OFFSET)
            early = _before_they_come_apart(states)
            states[early] = int(State.MEAN_OFFSET)
            reading = read_stack(battery, floor_relative, compared.get("null") or {}, states)
            state = reading.state
            if _is_by_construction(reading, site, pooling, compared):
                words = (
                    "not judged: all inputs begin with the same tokens, which in a causal model see nothing else. Use "
                    "'last' or 'mean'"
                )
                state = State.UNKNOWN
            else:
                words = _words(reading, compared) + _about_entry(reading, entry)
                words += _about_averaging(averaged, expected) + _about_early(reading, early)
                words += _about_classes(battery, met, compared, site, stack)
            named = f"{stack}, " if stack else ""
            by_place.append(
                (
                    state,
                    f"Between inputs ({named}{pooling}): {words}.",
                    list(reading.cited_values(stack)),
                )
            )
    if not by_place:
        return []
    gravest = max(state for state, _, _ in by_place)
    steps = (f"rankscope measure {model or 'MODEL'} --between-inputs last",) if gravest >= State.COLLAPSED else ()
    finding = AxisFinding(
        "inputs",
        gravest.code,
        " ".join(sentence for _, sentence, _ in by_place),
        tuple(item for _, _, evidence in by_place for item in evidence),
        steps if set(compared["poolings"]) == {MEAN} else (),
    )
    return [finding]


def _class_gaps(compared: Mapping[str, Any], site: str, stack: str | None) -> Mapping[str, float]:
    """By block, the relative residual of the two closest classes of inputs; empty if classes are not known."""
    gaps: Mapping[str, float] = compared.get("classes", {}).get("apart", {}).get(site, {}).get(stack or "", {})
    return gaps


def _met_by_class(battery: Battery, states: np.ndarray, gaps: Mapping[str, float]) -> Flags:
    """Where inputs have the same vector as others, and no two classes have: neural collapse."""
    alike = np.isin(states, (int(State.COPIES), int(State.CLUSTERS), int(State.COLLAPSED), int(State.SAME_DIRECTION)))
    apart = np.array([gaps.get(str(int(layer)), 0.0) > COLLAPSED_RESIDUAL for layer in battery.layers], np.bool_)
    met: Flags = alike & apart[:, None]
    return met


def _about_classes(battery: Battery, met: Flags, compared: Mapping[str, Any], site: str, stack: str | None) -> str:
    if not met.any():
        return ""
    gaps = _class_gaps(compared, site, stack)
    rows: list[int] = np.flatnonzero(met.any(axis=1)).tolist()
    closest = min(gaps[str(int(battery.layers[row]))] for row in rows)
    where, count = span_of(rows, battery.layers), compared["classes"]["count"]
    return (
        f". Inputs of one class meet {where}, and the {count} classes stay apart (the two closest have relative "
        f"residual {number(closest)}): neural collapse, as training for these labels aims at"
    )


def _at_entry(table: pa.Table, site: str) -> float | None:
    """The relative residual between inputs as they enter the first block; None if it was not measured.

    Of tokens that are equal there, such as a class token, it is that of the means over all tokens.
    """
    for place in (site + ENTRY, MEAN + ENTRY):
        rows = only(table, metric=METRIC, site=place)
        usable = only(rows, status=str(Status.OK)) if rows.num_rows else rows
        if usable.num_rows and (value := float(usable["value"][0].as_py())) > 0.0:
            return value
    return None


def _is_kept(battery: Battery, states: np.ndarray, entry: float | None) -> Flags:
    """Where inputs look alike only because they enter the model alike, and keep what tells them apart."""
    if entry is None:
        return np.zeros(states.shape, np.bool_)
    least, spread = KEPT_SPREAD * entry, battery.spread()
    copies = np.isin(states, (int(State.COPIES), int(State.CLUSTERS))) & (spread <= 2 * COLLAPSED_RESIDUAL)
    kept: Flags = ((states == State.COLLAPSED) | copies) & (spread > least)
    kept |= (states == State.SAME_DIRECTION) & (battery.direction() > least)
    return kept


def _about_entry(r: StackReading, entry: float | None) -> str:
    """What the model leaves of the differences that its inputs have when they enter it."""
    if entry is None or r.state not in (State.MEAN_OFFSET, State.COLLAPSED, State.FLOOR, State.COLLAPSING):
        return ""
    lowest = r.value("spread", r.worst("spread", list(range(r.battery.layers.size)), highest=False))
    if r.state is not State.FLOOR and lowest < entry:
        return f". Of what told them apart before the first block, {percent(lowest / entry)} is left"
    return f". Before the first block they differ by {percent(entry)}"


def averaging_residual(residuals: Floats, counts: Floats) -> float:
    r"""Relative residual that mean-pooled inputs have if tokens are independent and no input differs in its mean.

    **Estimate**, :math:`\sqrt{\mathrm{mean}_i\; r_i^2 / ((1 - r_i^2)\, n_i)}` with the relative residuals
    :math:`r_i` of the tokens of each input and their numbers :math:`n_i`: averaging n tokens divides their spread
    around the mean by :math:`\sqrt n`. Tokens of a text are not independent, so real inputs lie above it. NaN where
    averaging is not what makes inputs alike: if :math:`r_i` is a smaller factor than :math:`1/\sqrt{n_i}`, or counts as
    collapsed, inputs are alike because tokens are.

    Example:
        >>> round(averaging_residual(np.array([0.6, 0.6]), np.array([9.0, 9.0])), 12)
        0.25
    """
    known = np.isfinite(residuals) & (residuals < 1.0) & (counts >= 1)
    if not known.any():
        return math.nan
    r, n = residuals[known], counts[known]
    if np.median(r) <= max(COLLAPSED_RESIDUAL, 1.0 / math.sqrt(float(np.median(n)))):
        return math.nan
    return float(np.sqrt(np.mean(r**2 / ((1.0 - r**2) * n))))


def _not_judged(compared: Mapping[str, Any]) -> str:
    """Why nothing can be said about these inputs; empty if something can."""
    inputs, distinct = compared["inputs"], compared["distinct"]
    if inputs < 2:
        return "there is one input: pass several different ones"
    if distinct == 1:
        return f"all {inputs} inputs are identical: pass different ones"
    if distinct < LEAST_INPUTS:
        return f"{distinct} different inputs are too few (at least {LEAST_INPUTS}); the values are in the table"
    return ""


def _averaging(table: pa.Table, layers: np.ndarray, lengths: Mapping[int, int]) -> Floats:
    """:func:`averaging_residual` of each layer, as a column; NaN if the tokens were not measured."""
    shares = np.full((layers.size, 1), math.nan)
    rows = only(table, metric="relative_residual", site=TOKENS_SITE)
    if rows.num_rows == 0 or not lengths:
        return shares
    grid = cells(rows, "relative_residual", TOKENS_SITE)
    counts = np.array([lengths.get(int(sequence), math.nan) for sequence in grid.sequences], dtype=np.float64)
    for row, layer in enumerate(grid.layers):
        shares[layers == layer] = averaging_residual(grid.values[row], counts)
    return shares


def _before_they_come_apart(states: np.ndarray) -> np.ndarray:
    """Rows in which inputs are equal and after which they are not.

    What differs later was not lost: a class token is the same in all inputs until attention has told it of the others.
    """
    equal = np.isin(states, (int(State.COLLAPSED), int(State.FLOOR)))
    equal_until: np.ndarray = equal & np.logical_or.accumulate((~equal)[::-1], axis=0)[::-1]
    return equal_until


def _about_early(r: StackReading, early: np.ndarray) -> str:
    rows = np.flatnonzero(early.any(axis=1)).tolist()
    if not rows:
        return ""
    value = r.cite("spread", r.worst("spread", rows, highest=False), beside_null=False)
    where = span_of(rows, r.battery.layers)
    return f". They are nearly equal {where} ({value}) and come apart after it, so nothing is lost"


def _is_by_construction(reading: StackReading, site: str, pooling: str, compared: Mapping[str, Any]) -> bool:
    """Whether the pooled token and all before it are the same in every input, and its vectors are equal everywhere."""
    position = {"inputs.first": 0, "inputs.at": int(pooling.partition(":")[2] or 0)}.get(site)
    if position is None or compared["common_prefix"] <= position:
        return False
    return bool((reading.battery.floor | (reading.battery.values["spread"] == 0.0)).all())


def _words(r: StackReading, compared: Mapping[str, Any]) -> str:
    inputs = compared["inputs"]
    repeated = "" if compared["distinct"] == inputs else f" ({compared['distinct']} different)"
    lowest = r.worst("spread", list(range(r.battery.layers.size)), highest=False)
    at = r.rows(r.state)[0] if r.state is not State.HEALTHY and r.rows(r.state) else lowest
    if r.state in (State.MEAN_OFFSET, State.COLLAPSING):
        at = lowest  # the block these sentences name
    r.cite_all(at, "spread", "cosine", "centred_dimension")
    if r.state is State.VANISHED:
        return f"the pooled vectors are exactly zero {r.span(State.VANISHED)}"
    if r.state in (State.COLLAPSED, State.FLOOR):
        span = r.span(State.COLLAPSED, State.FLOOR)
        at = r.rows(State.COLLAPSED, State.FLOOR)[0]
        if r.state is State.FLOOR and not r.rows(State.COLLAPSED):
            return f"collapsed {span}: {inputs} inputs{repeated} get the same vector to the last digits of its format"
        r.cite_all(at, "spread", "cosine", "centred_dimension")
        return (
            f"collapsed {span}: at {r.block(at)}, {inputs} inputs{repeated} differ from their mean by "
            f"{percent(r.value('spread', at))} of their size{r.name(at, 'spread')}"
        )
    where = "where they are closest, " if r.battery.layers.size > 1 else ""
    closest = (
        f"{where}at {r.block(lowest)}, {inputs} inputs{repeated} differ from their mean by "
        f"{percent(r.value('spread', lowest))} of their size{r.name(lowest, 'spread')}"
    )
    if r.state is State.MEAN_OFFSET:
        return f"not collapsed: {closest}; they share a large common vector, which is usual for pooled inputs"
    if r.state in _SAYS:
        at = r.rows(r.state)[0]
        same = percent(r.value("cluster_share", at))
        words = _SAYS[r.state].format(inputs=f"{inputs} inputs{repeated}", share=same)
        facts = _with_most_rank(r.cite_all(at, *_SHOWN_BY[r.state]).replace("token", "input"), compared)
        mild = "not collapsed, but " if r.state < State.CLUSTERS else ""
        return f"{mild}{words}, {r.span(r.state)}{facts} at {r.block(at)}"
    if r.state is State.COLLAPSING:
        return f"collapsing: inputs become alike block by block; {closest}"
    return f"not collapsed: {closest}"


_SAYS: Mapping[State, str] = {
    State.FEW_DIRECTIONS: "{inputs} differ along a few directions only",
    State.HUGE_CHANNEL: "one channel carries most of the energy of {inputs}",
    State.HUGE_TOKEN: "one of {inputs} carries most of the energy",
    State.CLUSTERS: "nearly each of {inputs} has the same vector as another",
    State.SAME_DIRECTION: "{inputs} point the same way; what differs is mostly their norm",
    State.COPIES: "{share} of {inputs} have the same vector",
}
_SHOWN_BY: Mapping[State, tuple[str, ...]] = {
    State.FEW_DIRECTIONS: ("directions", "centred_dimension"),
    State.HUGE_CHANNEL: ("channel_share",),
    State.HUGE_TOKEN: ("token_share",),
    State.CLUSTERS: ("distinct", "copied_share"),
    State.SAME_DIRECTION: ("direction", "cosine"),
    State.COPIES: ("cluster_share", "distinct"),
}
"""The values that show a state; others, such as a residual that half of the inputs keep large, may seem to deny it."""


def _with_most_rank(facts: str, compared: Mapping[str, Any]) -> str:
    """Add to a centred rank how large it can be: N points around their mean span at most N - 1 directions."""
    most = min(compared["inputs"] - 1, compared["width"] or math.inf)
    return re.sub(r"(centred [a-z ]+ [-+.e0-9]+)", rf"\1 of at most {most}", facts)


def _about_averaging(averaged: np.ndarray, expected: Floats) -> str:
    if not averaged.any():
        return ""
    level = number(float(expected[averaged.any(axis=1)].max()))
    return (
        f". The residual is small because each mean is over many tokens: independent tokens would give {level}. Use "
        "'last' to compare single tokens"
    )
