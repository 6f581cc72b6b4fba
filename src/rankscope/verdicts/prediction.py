"""The state a design is predicted to be in, by the same table as a measured one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope.verdicts.battery import Floats, residual_battery
from rankscope.verdicts.reading import Reading, read


def predicted_state(table: pa.Table, depth: int) -> Reading:
    """Judge the relative residuals of the first ``depth`` blocks: extrapolated to the context, else one per seed."""
    curves = set(table["curve"].to_pylist())
    curve = "extrapolated" if "extrapolated" in curves else "sampled"
    keep = pc.and_(pc.equal(table["curve"], curve), pc.equal(table["site"], "block.out"))
    rows = table.filter(pc.and_(keep, pc.less(table["layer"], depth)))
    seeds, column = np.unique(rows["sequence"].to_numpy(), return_inverse=True)
    logs = np.full((depth, seeds.size), np.nan)
    logs[rows["layer"].to_numpy(), column] = rows["value"].to_numpy()
    return read_logs(logs)


def read_logs(logs: Floats) -> Reading:
    """Judge log10 of relative residuals after each block, ``(blocks, sequences)``; minus infinity is an exact zero."""
    with np.errstate(under="ignore"):
        residuals = np.power(10.0, logs)
    return read(residual_battery(range(len(logs)), residuals, metric="log10_relative_residual"), None, {})
