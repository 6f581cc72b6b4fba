"""Runs: rows with statuses, their provenance and storage, and the numbers derived from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._lazy import names_of

if TYPE_CHECKING:
    from rankscope.runs.curves import Curve
    from rankscope.runs.provenance import Provenance
    from rankscope.runs.rows import RowWriter
    from rankscope.runs.run import Run, load_run

__all__ = [
    "Curve",
    "Provenance",
    "RowWriter",
    "Run",
    "load_run",
]

__getattr__ = names_of(__name__)
