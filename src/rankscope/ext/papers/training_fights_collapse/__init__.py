"""Small models trained with and without skips, MLPs and norms: does training slow collapse?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rankscope._citations import Cite
from rankscope.ext.papers._spec import Reproduction, Settings, Story, declare

if TYPE_CHECKING:
    from rankscope.runs.run import Run


def _run() -> Callable[[Settings], Run]:
    from rankscope.ext.papers.training_fights_collapse.run import measure

    return measure


def _show() -> Story:
    from rankscope.ext.papers.training_fights_collapse import show

    return show


ENTRY = Reproduction(
    run=_run,
    show=_show,
    name="training-fights-collapse",
    title="Does training fight collapse?",
    cites=(Cite("dong2021attention", "sec. 4.1"), Cite("noci2022signal")),
    paper=(
        "Dong, Cordonnier and Loukas (2021, section 4.1) find doubly exponential collapse in networks whose skips and "
        "MLPs were removed after training, or that were never trained, and expect slower collapse in networks trained "
        "in that form. Noci et al. (2022) show that the gradients of queries and keys vanish at collapse, so that "
        "training could not undo it."
    ),
    figure=(
        "Relative residual after the last block, gradient of queries and keys over that of values, and loss, over "
        "training steps, for an encoder and a causal model with and without skips, MLPs and norms"
    ),
    minutes=10,
)
declare(ENTRY)
