"""Number of paths by length: exact, in whole numbers."""

from __future__ import annotations

import math
from fractions import Fraction

from rankscope.ext.papers._curves import published
from rankscope.ext.papers._spec import Settings
from rankscope.ext.papers.measuring.parts import RowRecorder, finished_run
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run

SHARE, COUNT = "path_share", "path_count"


def path_counts(heads: int, blocks: int) -> list[int]:
    r"""Paths of each length in a network with skips, from 0 up: :math:`\binom{L}{k} H^k`.

    **Exact**; whole numbers of any size.

    Example:
        >>> path_counts(heads=2, blocks=2)
        [1, 4, 4]
    """
    return [math.comb(blocks, length) * heads**length for length in range(blocks + 1)]


def measure(settings: Settings) -> Run:
    """Counts and shares by length for every listed model; for the first three at small size."""
    writer = RowWriter(coordinates=("model", "heads", "blocks", "seed"))
    models = published("dong2021_path_census")["models"]
    for entry in models[:3] if settings.small else models:
        rows = RowRecorder(writer, {**entry, "seed": 0})
        counts = path_counts(entry["heads"], entry["blocks"])
        for length, count in enumerate(counts):
            rows.add(SHARE, float(Fraction(count, sum(counts))), "paths", layer=length)
            rows.add(COUNT, float(count), "paths", layer=length)
    provenance = Provenance(model="(heads, blocks) of published models", origin="published")
    floor = {"dtype": None, "relative": None, "meaning": "whole numbers; nothing is rounded before it is stored"}
    return finished_run(settings, writer, provenance, floor)
