"""What each block changes of the stream, in one sentence."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rankscope.runs.curves import Curve, curve
from rankscope.runs.rows import of_stack, only
from rankscope.runs.summary import stacks_of
from rankscope.verdicts.axes import AxisFinding
from rankscope.verdicts.states import COLLAPSED_RESIDUAL, IDLE_WRITE, MAJORITY, State

METRIC, SITE = "write_ratio", "block.update"
FEWEST_BLOCKS = 2


def depth_findings(table: pa.Table) -> list[AxisFinding]:
    """One finding per stack of at least two blocks: by how much blocks change the stream.

    Blocks are compared by ``write_ratio`` at ``block.update``, averaged over sequences. The code is ``collapsed`` if
    half of the blocks or more change the stream by less than the residual at which tokens count as collapsed.
    """
    here = only(table, metric=METRIC, site=SITE)
    stacks = stacks_of(here)
    findings = []
    for stack in stacks:
        rows = of_stack(here, stack)
        line = curve(rows, METRIC, SITE) if rows.num_rows else None
        if line is not None and np.isfinite(line.mean).sum() >= FEWEST_BLOCKS:
            findings.append(_of_stack(line, stack if len(stacks) > 1 else None))
    return findings


def _of_stack(line: Curve, stack: str | None) -> AxisFinding:
    known = np.isfinite(line.mean)
    layers, change = line.layers[known], line.mean[known]
    first, last = longest_run(change < IDLE_WRITE)
    where = f" of the {stack}" if stack else ""
    if last - first >= FEWEST_BLOCKS:
        cited = np.arange(first, last)
        others = np.delete(change, cited)
        sentence = (
            f"Depth: blocks {layers[first]} to {layers[last - 1]}{where} change the stream by "
            f"{_percent(change[cited])} each{f', the others by {_percent(others)}' if others.size else ''}."
        )
    else:
        cited = np.array([change.argmin(), change.argmax()])
        least, most = (_percent(change[[place]]) for place in cited)
        ends = (f"{value} (block {layers[place]})" for value, place in zip((least, most), cited, strict=True))
        how = f"{least} each" if least == most else " to ".join(ends)
        sentence = f"Depth: blocks{where} change the stream by {how}."
    idle = int((change < COLLAPSED_RESIDUAL).sum())
    code = State.COLLAPSED if idle >= MAJORITY * change.size else State.HEALTHY
    if code is State.COLLAPSED:
        blocks = "every block changes" if idle == change.size else f"{idle} of {change.size} blocks change"
        sentence = (
            f"Depth: collapsed: {blocks} the stream by less than {_percent(np.array([COLLAPSED_RESIDUAL]))}, which is "
            f"usual at initialisation and, after training, means that they do next to nothing. {_upper(sentence)}"
        )
    evidence = tuple(
        {"code": code.code, "metric": METRIC, "site": SITE, "stack": stack,
         "layer": int(layers[place]), "value": float(change[place])}
        for place in cited
    )  # fmt: skip
    return AxisFinding("depth", code.code, sentence, evidence, is_usual_at_first=True)


def _upper(sentence: str) -> str:
    sentence = sentence.removeprefix("Depth: ")
    return f"{sentence[:1].upper()}{sentence[1:]}"


def longest_run(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """Start and end of the longest run of True, the first of several; ``(0, 0)`` if there is none.

    Example:
        >>> longest_run(np.array([True, False, True, True]))
        (2, 4)
    """
    best, start = (0, 0), None
    for place, flag in enumerate([*flags.tolist(), False]):
        if flag:
            start = place if start is None else start
        elif start is not None:
            best = max(best, (start, place), key=lambda run: run[1] - run[0])
            start = None
    return best


def _percent(values: NDArray[np.float64]) -> str:
    """The range of values in percent.

    Example:
        >>> _percent(np.array([0.031, 0.049])), _percent(np.array([0.0004]))
        ('3 to 5%', '0.04%')
    """
    low, high = (
        f"{100 * value:.0f}" if value >= 0.0095 else f"{100 * value:.1g}" for value in (values.min(), values.max())
    )
    return f"{low}%" if low == high else f"{low} to {high}%"
