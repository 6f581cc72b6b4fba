"""Cosines between the tokens of one sequence, block by block, under a slider."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankscope.reporting.page.parts import Chart, Choice, Section
from rankscope.reporting.page.wording import clipped, visible
from rankscope.runs.run import Run
from rankscope.runs.similarity import Similarity, similarities_in

MOST_BLOCKS = 64
LONGEST_TOKEN = 24


def similarity_section(run: Run, detail: int) -> Section | None:
    """The matrices a run carries; None where it carries none."""
    stacks = similarities_in(run.extra)
    if not stacks:
        return None
    views: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for name, found in stacks.items():
        for position in _chosen(len(found.blocks)):
            views[name, str(found.blocks[position])] = _view(found, position)
    blocks = tuple((block, f"block {block}") for block in dict.fromkeys(key[1] for key in views))
    names = Choice("stack", tuple((name, visible(name)) for name in dict.fromkeys(key[0] for key in views)))
    first = next(iter(stacks.values()))
    shown = len(first.positions)
    some = f"{shown} evenly spaced tokens of {first.tokens}" if shown < first.tokens else f"all {shown} tokens"
    chart = Chart(
        "matrix",
        "Tokens against tokens",
        f"Cosine between {some} of sequence {first.sequence}, behind each block. When all turn one colour, the tokens "
        "point one way.",
        (names, Choice("block", blocks)),
        views,
        slider="block",
    )
    return Section("How alike the tokens are", "Move the slider through the blocks.", (chart,))


def _chosen(count: int) -> Sequence[int]:
    if count <= MOST_BLOCKS:
        return range(count)
    return sorted({int(place) for place in np.linspace(0, count - 1, MOST_BLOCKS).round()})


def _view(found: Similarity, position: int) -> dict[str, Any]:
    cosines = found.matrices[position]
    known = np.isfinite(cosines)
    levels = np.where(known, np.rint(np.nan_to_num(cosines) * 127), -128).astype(np.int8)
    size = len(found.positions)
    pairs = cosines[~np.eye(size, dtype=bool)]
    pairs = pairs[np.isfinite(pairs)]
    return {
        "metric": "mean_cosine",
        "size": size,
        "data": base64.b64encode(levels.tobytes()).decode("ascii"),
        "positions": list(found.positions),
        "labels": [clipped(label, LONGEST_TOKEN) for label in found.labels],
        "mean": round(float(pairs.mean()), 4) if pairs.size else None,
    }
