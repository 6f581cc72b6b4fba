"""Whether blocks still change the stream."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from rankscope.runs.curves import curve
from rankscope.runs.rows import of_stack, only
from rankscope.runs.summary import stacks_of
from rankscope.verdicts.axes import AxisFinding
from rankscope.verdicts.sentences import say, short
from rankscope.verdicts.states import COLLAPSED_RESIDUAL, MAJORITY, State

METRIC, SITE = "write_ratio", "block.update"
FEWEST_BLOCKS = 2


def depth_findings(table: pa.Table) -> list[AxisFinding]:
    """One finding per stack of at least two blocks: by how much blocks change the stream.

    Blocks are compared by ``write_ratio`` at ``block.update``, averaged over sequences. The code is ``collapsed`` if
    half of the blocks or more change the stream by less than the residual at which tokens count as collapsed. Otherwise
    there is no sentence, because the table has the values.
    """
    here = only(table, metric=METRIC, site=SITE)
    findings = []
    for stack in stacks_of(here):
        rows = of_stack(here, stack)
        if not rows.num_rows:
            continue
        line = curve(rows, METRIC, SITE)
        known = np.isfinite(line.mean)
        layers, change = line.layers[known], line.mean[known]
        if change.size < FEWEST_BLOCKS:
            continue
        idle = int((change < COLLAPSED_RESIDUAL).sum())
        code = State.COLLAPSED if idle >= MAJORITY * change.size else State.HEALTHY
        words = say("depth", idle=idle, blocks=change.size, least=f"{COLLAPSED_RESIDUAL:g}")
        ends = (int(change.argmin()), int(change.argmax()))
        least, most = (f"{short(float(change[place]))} (block {layers[place]})" for place in ends)
        evidence = tuple(
            {"code": code.code, "metric": METRIC, "site": SITE, "stack": stack,
             "layer": int(layers[place]), "value": float(change[place])}
            for place in ends
        )  # fmt: skip
        findings.append(
            AxisFinding("depth", code.code, words if code is State.COLLAPSED else "", evidence, is_usual_at_first=True,
                        details=f"Depth: blocks change the stream by {least} to {most}.")
        )  # fmt: skip
    return findings
