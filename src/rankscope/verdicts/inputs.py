"""Whether different inputs still have different representations: the battery over pooled inputs, in words."""

from __future__ import annotations

import math
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
from rankscope.verdicts.reading import read_stack, span_of
from rankscope.verdicts.sentences import explained, say, short, token_sentences
from rankscope.verdicts.states import AVERAGING, COLLAPSED_RESIDUAL, LEAST_INPUTS, REMAINING_SPREAD, State

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
        asked: whether the caller asked for it; if so, a missing verdict is explained.
    """
    why = _not_judged(compared)
    if why:
        words = say("inputs not judged", pooling="", why=why)
        return [AxisFinding("inputs", State.UNKNOWN.code, words)] if asked else []
    found: list[tuple[State, str, list[dict[str, Any]], str]] = []
    for site, pooling in compared["poolings"].items():
        here = only(table, site=site)
        for stack in stacks_of(here) if here.num_rows else []:
            mine = of_stack(here, stack)
            battery = read_battery(mine, lengths={0: compared["inputs"]}, dim=compared["width"], sites=(site,))
            if battery is not None and "spread" in battery.played_by:
                averaging = _averaging(of_stack(table, stack), battery.layers, lengths.get(stack, {}))
                entry = _at_entry(of_stack(table, stack), site)
                place = f"({stack}, {pooling})" if stack else f"({pooling})"
                found.append(_judged(battery, compared, site, pooling, stack, place, averaging, entry, floor_relative))
    if not found:
        return []
    gravest = max(state for state, *_ in found)
    # Means of many tokens hide what single tokens show.
    steps = (f"rankscope measure {model or 'MODEL'} --between-inputs last",)
    return [
        AxisFinding(
            "inputs",
            gravest.code,
            " ".join(words for _, words, _, _ in found),
            tuple(item for _, _, evidence, _ in found for item in evidence),
            steps if gravest >= State.COLLAPSED and set(compared["poolings"]) == {MEAN} else (),
            details="\n".join(details for *_, details in found),
        )
    ]


def _judged(
    battery: Battery,
    compared: Mapping[str, Any],
    site: str,
    pooling: str,
    stack: str | None,
    place: str,
    averaging: Floats,
    entry: float | None,
    floor: float | None,
) -> tuple[State, str, list[dict[str, Any]], str]:
    """State, sentences, evidence and details of one way of pooling in one stack.

    Inputs may look alike for four reasons that are no collapse; each makes its blocks a mean offset.
    """
    states, spread = classify(battery), battery.spread()
    details = []
    # The mean of many tokens varies little from input to input.
    if site == MEAN:
        averaged = (states == State.COLLAPSED) & (spread >= AVERAGING * averaging)
        states[averaged] = int(State.MEAN_OFFSET)
        if averaged.any():
            level = short(float(averaging[averaged.any(axis=1)].max()))
            details.append(
                f"  each mean is over many tokens: independent tokens would have a relative residual of {level}; "
                "'last' compares single tokens"
            )
    # They enter the model alike, and keep what distinguishes them.
    states[_still_spread(battery, states, entry)] = int(State.MEAN_OFFSET)
    # Inputs of one class have the same vector, and no two classes have: neural collapse.
    gaps = compared.get("classes", {}).get("apart", {}).get(site, {}).get(stack or "", {})
    apart = np.array([gaps.get(str(int(layer)), 0.0) > COLLAPSED_RESIDUAL for layer in battery.layers], np.bool_)
    met = np.isin(states, (State.COPIES, State.CLUSTERS, State.COLLAPSED, State.SAME_DIRECTION)) & apart[:, None]
    states[met] = int(State.MEAN_OFFSET)
    # They are equal and differ later: a class token is the same in all inputs until attention reads the others.
    equal = np.isin(states, (State.COLLAPSED, State.FLOOR))
    early = equal & np.logical_or.accumulate((~equal)[::-1], axis=0)[::-1]
    states[early] = int(State.MEAN_OFFSET)
    reading = read_stack(battery, states)
    # The pooled token and all before it are the same in every input of a causal model.
    alike = bool((battery.floor | (battery.values["spread"] == 0.0)).all())
    if site == "inputs.first" and compared["common_prefix"] > 0 and alike:
        why = "all inputs begin with the same tokens; use 'last' or 'mean'"
        return State.UNKNOWN, say("inputs not judged", pooling=f" {place}", why=why), [], ""
    inputs, distinct = compared["inputs"], compared["distinct"]
    if distinct != inputs:
        details.append(f"  {distinct} of the inputs are different")
    words = [f"Between inputs {place}: {' '.join(token_sentences(reading, floor, f'{inputs} inputs'))}"]
    if met.any():
        rows = np.flatnonzero(met.any(axis=1)).tolist()
        words.append(say("classes", where=span_of(rows, battery.layers)))
        closest = short(min(gaps[str(int(battery.layers[row]))] for row in rows))
        classes = compared["classes"]["count"]
        details.append(f"  relative residual {closest} between the two closest of {classes} classes")
    if entry is not None:
        details.append(f"  relative residual {short(entry)} before the first block")
    if early.any():
        where = span_of(np.flatnonzero(early.any(axis=1)).tolist(), battery.layers)
        details.append(f"  they are nearly equal {where} and come apart after it, so nothing is lost")
    told = "\n".join([f"Between inputs {place}: {explained(reading, compared.get('null') or {})}", *details])
    return reading.state, " ".join(words), reading.cited_values(stack), told


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


def _still_spread(battery: Battery, states: np.ndarray, entry: float | None) -> Flags:
    """Where inputs look alike only because they enter the model alike, and keep what distinguishes them."""
    if entry is None:
        return np.zeros(states.shape, np.bool_)
    least, spread = REMAINING_SPREAD * entry, battery.spread()
    copies = np.isin(states, (int(State.COPIES), int(State.CLUSTERS))) & (spread <= 2 * COLLAPSED_RESIDUAL)
    kept: Flags = ((states == State.COLLAPSED) | copies) & (spread > least)
    kept |= (states == State.SAME_DIRECTION) & (battery.direction() > least)
    return kept


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
        return f"{distinct} different inputs are too few (at least {LEAST_INPUTS})"
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
