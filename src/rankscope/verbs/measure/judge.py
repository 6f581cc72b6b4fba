"""What a run says about values that are estimates."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from rankscope._types import Status
from rankscope.runs.rows import only

VALUE, BOUND = "attention_contraction", "attention_contraction_bound"


def notes_on_estimates(table: pa.Table) -> tuple[str, ...]:
    """One sentence if a value of the table is an estimate, with the interval that contains it if that was measured."""
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
