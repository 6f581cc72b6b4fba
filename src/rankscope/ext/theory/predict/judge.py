"""The state a design is predicted to be in, by the same table as a measured one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow.compute as pc

from rankscope.runs.rows import only
from rankscope.runs.run import Run
from rankscope.verdicts.battery import Floats, residual_battery
from rankscope.verdicts.reading import StackReading, read_stack
from rankscope.verdicts.sentences import in_words
from rankscope.verdicts.states import State


def with_state(run: Run, depth: int) -> Run:
    """A prediction that also names its state within ``depth`` blocks."""
    rows = only(run.table, curve="sampled", site="block.out")
    rows = rows.filter(pc.less(rows["layer"], depth))
    seeds, column = np.unique(rows["sequence"].to_numpy(), return_inverse=True)
    logs = np.full((depth, seeds.size), np.nan)
    logs[rows["layer"].to_numpy(), column] = rows["value"].to_numpy()
    reading = read_logs(logs)
    state = in_words(reading).replace("sequences", "seeds")  # one sequence per seed
    if State.HEALTHY < reading.state < State.COLLAPSING:
        state = f"no collapse, {state},"
    sampling = run.extra["sampling"]
    shorter = f" at a context of {sampling['tokens']} tokens" if sampling["tokens"] < sampling["context"] else ""
    words = f"{state[0].upper()}{state[1:]} within {depth} blocks{shorter}. {run.verdict}"
    return replace(run, verdict=words, code=reading.state.code)


def read_logs(logs: Floats) -> StackReading:
    """Judge log10 of relative residuals after each block, ``(blocks, sequences)``; minus infinity is an exact zero."""
    with np.errstate(under="ignore"):
        residuals = np.power(10.0, logs)
    return read_stack(residual_battery(range(len(logs)), residuals, metric="log10_relative_residual"))
