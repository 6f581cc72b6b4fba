"""What a run says about values that are estimates."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope._types import Status
from rankscope.runs.curves import names_in
from rankscope.runs.rows import only

VALUE, BOUND = "attention_contraction", "attention_contraction_bound"
RANKS = {
    centred + name
    for name in ("stable_rank", "effective_rank", "participation_ratio", "energy_rank_99")
    for centred in ("", "centred_")
} | {"rankme"}
"""Metrics of which large shapes have estimates, from 1,024 evenly spaced tokens; ``rankme`` is the effective rank."""


def notes_on_estimates(table: pa.Table) -> tuple[str, ...]:
    """A sentence for each kind of estimate in the table, and how far off it may be if that was measured."""
    notes = _notes_on_contraction(table)
    if names := _sampled(table):
        notes += (
            f"{', '.join(names)} marked ~ (status 'estimated') are those of 1,024 evenly spaced tokens of "
            "each sequence, and not of all its tokens; no rank above that is seen. spectra='exact' (--spectra exact) "
            "computes them from all tokens",
        )
    return notes


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
    return (f"{said}.",)


def spectra_in(table: pa.Table) -> str:
    """How the ranks of tokens were computed."""
    return "estimated" if _sampled(table) else "exact"


def _sampled(table: pa.Table) -> list[str]:
    rows = only(table, status=str(Status.ESTIMATE))
    # Between inputs, every estimate is from a sample of the inputs.
    estimated = names_in(rows.filter(pc.invert(pc.starts_with(pc.cast(rows["site"], "string"), "inputs."))), "metric")
    return [name for name in estimated if name in RANKS]
