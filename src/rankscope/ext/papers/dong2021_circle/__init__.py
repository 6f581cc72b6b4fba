"""Two points moved around a circle by one attention layer, applied repeatedly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rankscope._citations import Cite
from rankscope.ext.papers._spec import Reproduction, Settings, Story, declare

if TYPE_CHECKING:
    from rankscope.runs.run import Run


def _run() -> Callable[[Settings], Run]:
    from rankscope.ext.papers.dong2021_circle.run import measure

    return measure


def _show() -> Story:
    from rankscope.ext.papers.dong2021_circle import show

    return show


ENTRY = Reproduction(
    run=_run,
    show=_show,
    name="dong2021-circle",
    title="One attention layer, applied repeatedly, loses the circle",
    cites=(Cite("dong2021attention", "sec. 4.3"),),
    paper=(
        "Dong, Cordonnier and Loukas (2021, section 4.3) train a single block with two heads to move two opposite "
        "points of a circle one step along it, and then apply the block to its own output. Without skip and MLP the "
        "two trajectories meet. With either of them they do not meet, or meet later, and a wider block takes longer."
    ),
    figure=(
        "Trajectories of two points under one trained block with and without skip and MLP at two widths, and the "
        "distance between the points in float64 and in exact arithmetic"
    ),
    minutes=3,
)
declare(ENTRY)
