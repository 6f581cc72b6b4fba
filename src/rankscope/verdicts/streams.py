"""What is said about the residual streams of one token, if it has several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rankscope.runs.curves import cells, names_in
from rankscope.runs.rows import of_stack, only
from rankscope.verdicts.axes import AxisFinding
from rankscope.verdicts.states import COLLAPSED_RESIDUAL, State

NOTHING = 1e-6
"""A contraction that float32 cannot tell from zero."""
METRIC, SITE, ENTRY = "relative_residual", "streams.out", "streams.in"


def streams_findings(table: pa.Table, mixing: Sequence[Mapping[str, Any]]) -> list[AxisFinding]:
    """One finding for each stack whose tokens have several streams and were measured.

    The streams count as collapsed if, after the last block, half of the sequences or more have a relative residual over
    streams of at most the threshold for tokens: a thousandth of the energy is then left to tell streams apart.
    """
    findings = []
    for described in mixing:
        here = only(of_stack(table, described["stack"]), metric=METRIC)
        if SITE in names_in(here, "site"):
            findings.append(_finding(here, described))
    return findings


def _finding(table: pa.Table, mixing: Mapping[str, Any]) -> AxisFinding:
    grid = cells(table, METRIC, SITE)
    line = np.array([np.median(known) if (known := row[np.isfinite(row)]).size else np.nan for row in grid.values])
    last, layer = float(line[-1]), int(grid.layers[-1])
    if not np.isfinite(last):
        return AxisFinding("streams", State.UNKNOWN.code, "Streams: their relative residual is undefined.")
    at_floor = bool(grid.floor[-1].all())
    state = State.FLOOR if at_floor else State.COLLAPSED if last <= COLLAPSED_RESIDUAL else State.HEALTHY
    name = f"{mixing['stack']}: " if mixing["stack"] else ""
    count = int((grid.values[-1] <= COLLAPSED_RESIDUAL).sum())
    whose = "" if count in (0, grid.sequences.size) else f" in {count} of {grid.sequences.size} sequences"
    about = _about_streams(line, grid.layers, state, _at_entry(table), whose)
    sentence = f"{name}{about} {_about_mixing(mixing)}".strip()
    evidence = (
        {"code": state.code, "metric": METRIC, "site": SITE, "stack": mixing["stack"], "layer": layer, "value": last},
    )
    return AxisFinding("streams", state.code, f"Streams: {sentence}", evidence)


def _about_streams(line: np.ndarray, layers: np.ndarray, state: State, entry: float | None, whose: str) -> str:
    last = float(line[-1])
    starts = "they enter block 0 as copies" if entry is not None and entry <= COLLAPSED_RESIDUAL else None
    if state is State.HEALTHY:
        since = f", although {starts}" if starts else ""
        return (
            f"the residual streams of a token differ from their mean by {100 * last:.2g}% of their size after the last "
            f"block (relative residual over streams){since}{f'; they are equal{whose}' if whose else ''}."
        )
    low = np.flatnonzero(line > COLLAPSED_RESIDUAL)
    first = int(layers[low[-1] + 1]) if low.size else int(layers[0])
    digits = "to the last digits of their float format" if state is State.FLOOR else f"up to {last:.2g} of their size"
    since = (
        f". {starts[0].upper()}{starts[1:]}, which is how such models begin; after training it means that "
        "all streams together hold what one would"
        if starts and not low.size
        else ""
    )
    return f"from block {first} on the residual streams of a token are equal {digits}{whose}{since}."


def _about_mixing(mixing: Mapping[str, Any]) -> str:
    if "why" in mixing:
        return f"How blocks mix them was not measured: {mixing['why'].rstrip('.')}."
    typical, product = float(np.median(mixing["contraction"])), float(mixing["log10_product_contraction"][-1])
    blocks = len(mixing["blocks"])
    if typical <= NOTHING:
        return "Mixing makes them equal in one block: whatever told streams apart before it is lost."
    if mixing["kind"] == "not stochastic":
        return (
            f"Mixing matrices are not stochastic; one block changes differences between streams by at most x "
            f"{typical:.3g} (median)."
        )
    return (
        f"Mixing matrices are {mixing['kind']}; one block shrinks differences between streams to x {typical:.3g} or "
        f"less (median), {blocks} blocks together to x 10^{product:.1f}; only branches that write different amounts to "
        "different streams add to them."
    )


def _at_entry(table: pa.Table) -> float | None:
    if ENTRY not in names_in(table, "site"):
        return None
    values = cells(table, METRIC, ENTRY).values
    return float(np.nanmedian(values)) if np.isfinite(values).any() else None
