"""What a run says about values that are estimates."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from rankscope._types import Status
from rankscope.runs.curves import names_in
from rankscope.runs.rows import only

RANKS = {
    centred + name
    for name in ("stable_rank", "effective_rank", "participation_ratio", "energy_rank_99")
    for centred in ("", "centred_")
} | {"rankme"}
"""Metrics of which large shapes have estimates, from 1,024 evenly spaced tokens; ``rankme`` is the effective rank."""


def notes_on_estimates(table: pa.Table) -> tuple[str, ...]:
    """A sentence about the estimates in the table; none without any."""
    if names := _sampled(table):
        return (
            f"{', '.join(names)} marked ~ (status 'estimated') are those of 1,024 evenly spaced tokens of "
            "each sequence, and not of all its tokens; no rank above that is seen. spectra='exact' (--spectra exact) "
            "computes them from all tokens",
        )
    return ()


def spectra_in(table: pa.Table) -> str:
    """How the ranks of tokens were computed."""
    return "estimated" if _sampled(table) else "exact"


def _sampled(table: pa.Table) -> list[str]:
    rows = only(table, status=str(Status.ESTIMATE))
    # Between inputs, every estimate is from a sample of the inputs.
    estimated = names_in(rows.filter(pc.invert(pc.starts_with(pc.cast(rows["site"], "string"), "inputs."))), "metric")
    return [name for name in estimated if name in RANKS]
