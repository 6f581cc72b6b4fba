"""Ours against the print, curve by curve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.papers._lines import Line, has_line, line
from rankscope.papers._published import PublishedLine, published, published_line
from rankscope.runs.curves import names_in

if TYPE_CHECKING:
    from rankscope.runs.run import Run

METRIC = "relative_composite_residual"
CURVES = ("SAN", "SAN+MLP", "SAN+skip", "transformer")
BASE_DEPTH = 12
ENOUGH_SEEDS = 4
"""With fewer initialisations their standard deviation says nothing."""

READABLE = 1e-3
"""Below this the print, drawn on a linear axis, says little more than that the value is small."""


@dataclass(frozen=True)
class Comparison:
    """How far one of our curves is from its print.

    Attributes:
        model: as the paper names it.
        curve: as the paper names it.
        text: how our text was cut.
        depth: where the deviation is largest, measured in the allowance there.
        ours: our mean there.
        theirs: the print there.
        allowance: their stated spread (its small end) plus ours, there.
        within: depths where the deviation is inside that allowance, of those that can be compared.
        compared: depths that can be compared: both above rounding.
        within_wide: the same with the large end of the stated spread.
        deviations: largest distance in standard deviations between our initialisations; NaN with too few.
        ratio: largest factor between the two where the print is above a thousandth.
        rounding: depths where the print shows rounding; ours is at the float floor at every one of them, or not.
    """

    model: str
    curve: str
    text: str
    depth: int
    ours: float
    theirs: float
    allowance: float
    within: int
    compared: int
    within_wide: int
    deviations: float
    ratio: float
    rounding: str


def compare(run: Run) -> list[Comparison]:
    """Every curve at random initialisation that was printed; none for a run at small size."""
    return [_compared(*found) for found in _pairs(run)]


def _pairs(run: Run) -> Iterator[tuple[str, str, str, Line, PublishedLine, tuple[float, float]]]:
    facts = published("dong2021_fig2")
    stated = (float(facts["spread"]["low"]), float(facts["spread"]["high"]))
    for model in names_in(run.table, "model"):
        for text in names_in(run.table, "text"):
            for curve in CURVES:
                where = {"model": model, "weights": "init", "reading": "authors", "curve": curve, "text": text}
                if not has_line(run.table, **where):
                    continue
                ours = line(run.table, METRIC, **where)
                if ours.depth[-1] == BASE_DEPTH:
                    yield (
                        model,
                        curve,
                        text,
                        ours,
                        published_line(facts, model=model, weights="init", curve=curve),
                        stated,
                    )


def _compared(
    model: str, curve: str, text: str, ours: Line, theirs: PublishedLine, stated: tuple[float, float]
) -> Comparison:
    rounding = np.array([theirs.is_rounding(int(depth)) for depth in ours.depth])
    away = np.abs(ours.mean - theirs.values)[~rounding]
    spread = ours.spread[~rounding]
    worst = int(np.argmax(away / (stated[0] + spread)))
    between = np.maximum(ours.over_seeds[~rounding], np.finfo(float).tiny)
    mine, printed = ours.mean[~rounding], theirs.values[~rounding]
    readable = printed > READABLE
    factor = np.exp(np.abs(np.log(mine[readable] / printed[readable])))
    return Comparison(
        model=model,
        curve=curve,
        text=text,
        depth=int(ours.depth[~rounding][worst]),
        ours=float(mine[worst]),
        theirs=float(printed[worst]),
        allowance=float(stated[0] + spread[worst]),
        within=int((away <= stated[0] + spread).sum()),
        compared=int(away.size),
        within_wide=int((away <= stated[1] + spread).sum()),
        deviations=float((away / between).max()) if ours.seeds >= ENOUGH_SEEDS else float("nan"),
        ratio=float(factor.max()),
        rounding=_rounding(ours, rounding),
    )


def _rounding(ours: Line, rounding: np.ndarray) -> str:
    if not rounding.any():
        return "none"
    depths = ours.depth[rounding]
    small = bool((ours.mean[rounding] < READABLE).all())
    floor = ours.depth[ours.at_floor]
    words = f"{depths[0]} to {depths[-1]}: ours {'below a thousandth too' if small else 'above a thousandth'}"
    return f"{words}, at the float floor from {floor[0]}" if floor.size else words
