"""Whether the residual streams of one token still differ, if it has several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rankscope.runs.curves import cells, names_in
from rankscope.runs.rows import of_stack, only
from rankscope.verdicts.axes import AxisFinding
from rankscope.verdicts.reading import span_of
from rankscope.verdicts.sentences import say, short
from rankscope.verdicts.states import COLLAPSED_RESIDUAL, State

METRIC, SITE, ENTRY = "relative_residual", "streams.out", "streams.in"


def streams_findings(table: pa.Table, mixing: Sequence[Mapping[str, Any]]) -> list[AxisFinding]:
    """One finding for each stack whose tokens have several streams and were measured.

    The streams count as collapsed if, after the last block, half of the sequences or more have a relative residual over
    streams of at most the threshold for tokens: a thousandth of the energy is then left to distinguish streams.
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
        return AxisFinding("streams", State.UNKNOWN.code, "")
    state = State.COLLAPSED if last <= COLLAPSED_RESIDUAL else State.HEALTHY
    state = State.FLOOR if grid.floor[-1].all() else state
    count = int((grid.values[-1] <= COLLAPSED_RESIDUAL).sum())
    whose = "" if count == grid.sequences.size else f"in {count} of {grid.sequences.size} sequences, "
    # From the block after the last one in which they differ.
    differ = np.flatnonzero(line > COLLAPSED_RESIDUAL)
    start = int(differ[-1]) + 1 if differ.size else 0
    where = "" if state is State.HEALTHY else whose + span_of(range(start, line.size), grid.layers)
    name = "streams" if state is State.HEALTHY else "equal streams"
    words = say(name, where=where, value=short(last), block=layer)
    evidence = (
        {"code": state.code, "metric": METRIC, "site": SITE, "stack": mixing["stack"], "layer": layer, "value": last},
    )
    details = "\n".join(filter(None, [_about_entry(table), _about_mixing(mixing)]))
    return AxisFinding("streams", state.code, words, evidence, details=details)


def _about_entry(table: pa.Table) -> str:
    values = cells(table, METRIC, ENTRY).values if ENTRY in names_in(table, "site") else np.empty(0)
    known = values[np.isfinite(values)]
    copies = known.size and float(np.median(known)) <= COLLAPSED_RESIDUAL
    return "Streams: they enter block 0 as copies, which is how such models begin." if copies else ""


def _about_mixing(mixing: Mapping[str, Any]) -> str:
    if "why" in mixing:
        return f"Mixing of streams was not measured: {mixing['why'].rstrip('.')}."
    typical, product = float(np.median(mixing["contraction"])), float(mixing["log10_product_contraction"][-1])
    return (
        f"Mixing matrices of streams are {mixing['kind']}: one block multiplies differences between streams by at most "
        f"{short(typical)} (median), {len(mixing['blocks'])} blocks together by 10^{product:.1f}."
    )
