"""Which designs train, over depth, width, heads and skip gain, compared with the prediction before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rankscope._citations import Cite
from rankscope.ext.papers._spec import Reproduction, Settings, Story, declare

if TYPE_CHECKING:
    from rankscope.runs.run import Run


def _run() -> Callable[[Settings], Run]:
    from rankscope.ext.papers.width_depth.run import measure

    return measure


def _show() -> Story:
    from rankscope.ext.papers.width_depth import show

    return show


ENTRY = Reproduction(
    run=_run,
    show=_show,
    name="width-depth",
    title="Does the prediction at initialisation tell which designs train?",
    cites=(Cite("dong2021attention"),),
    paper=(
        "Dong, Cordonnier and Loukas (2021) describe a tug-of-war: attention pulls tokens together, skips and MLPs "
        "keep them apart. What this means for the choice of width and depth is left open."
    ),
    figure=(
        "Accuracy after training and predicted relative residual over depth and skip gain, for three widths; accuracy "
        "against prediction; areas under the curve"
    ),
    minutes=12,
)
declare(ENTRY)
