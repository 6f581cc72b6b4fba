"""What a run says about values that are estimates."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope._types import Status
from rankscope.runs.curves import names_in
from rankscope.runs.rows import INTERVAL, only
from rankscope.views import number

VALUE, BOUND = "attention_contraction", "attention_contraction_bound"


def notes_on_estimates(table: pa.Table) -> tuple[str, ...]:
    """A sentence for each kind of estimate in the table, with the interval that contains it if that was measured."""
    return (*_notes_on_contraction(table), *_notes_on_ranks(table))


def _notes_on_contraction(table: pa.Table) -> tuple[str, ...]:
    estimated = only(table, status=str(Status.ESTIMATE))
    lower = only(estimated, metric=VALUE)
    if lower.num_rows == 0:
        return ()
    every = only(table, metric=VALUE).num_rows
    said = (
        f"{VALUE} is a lower estimate in {lower.num_rows} of {every} matrices, which are too long to iterate to "
        "convergence (marked ~, status 'estimated')"
    )
    upper = only(estimated, metric=BOUND)
    if upper.num_rows == lower.num_rows:
        # Both were written from one view, in the same order.
        ratio = upper["value"].to_numpy() / lower["value"].to_numpy()
        said += f"; {BOUND} lies above it by a factor of {np.median(ratio):.2f} (median), {ratio.max():.2f} at most"
    else:
        said += f"; measure {BOUND} too, for an interval that contains it"
    return (f"{said}. More walks, as in attention_algorithm='blockwise:20', make it closer.",)


def spectra_in(table: pa.Table) -> str:
    """How the ranks of tokens were computed."""
    return "estimated" if INTERVAL[0] in table.column_names else "exact"


def _notes_on_ranks(table: pa.Table) -> tuple[str, ...]:
    if spectra_in(table) == "exact":
        return ()
    rows = table.filter(pc.is_valid(table["low"]))
    widest = []
    for metric in names_in(rows, "metric"):
        value, low, high = (only(rows, metric=metric)[name].to_numpy() for name in ("value", *INTERVAL))
        worst = int(np.argmax(high / low))
        ends = f"[{number(low[worst])}, {number(high[worst])}]"
        widest.append(f"{metric} {number(value[worst])} {ends}")
    return (
        "ranks marked ~ are estimates (status 'estimated'); the columns low and high contain an interval around each. "
        f"The widest: {', '.join(widest)}. spectra='exact' (--spectra exact) computes them from all singular values",
    )
