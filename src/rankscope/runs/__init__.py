"""Runs: rows with statuses, their provenance, how they are stored, and what is read from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._deferred import names_of

if TYPE_CHECKING:
    from rankscope.runs.bounds import grid_of
    from rankscope.runs.curves import Curve
    from rankscope.runs.decomposition import through_heads
    from rankscope.runs.exactness import exact_curves
    from rankscope.runs.provenance import Provenance
    from rankscope.runs.reruns import judge_rerun
    from rankscope.runs.rows import RowWriter
    from rankscope.runs.run import Run, load_run

__all__ = [
    "Curve",
    "Provenance",
    "RowWriter",
    "Run",
    "exact_curves",
    "grid_of",
    "judge_rerun",
    "load_run",
    "through_heads",
]

_HOME = {
    "Curve": "rankscope.runs.curves",
    "Provenance": "rankscope.runs.provenance",
    "RowWriter": "rankscope.runs.rows",
    "Run": "rankscope.runs.run",
    "exact_curves": "rankscope.runs.exactness",
    "grid_of": "rankscope.runs.bounds",
    "judge_rerun": "rankscope.runs.reruns",
    "load_run": "rankscope.runs.run",
    "through_heads": "rankscope.runs.decomposition",
}

__getattr__ = names_of(__name__, _HOME)
