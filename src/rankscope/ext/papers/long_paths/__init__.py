"""Networks trained with reduced skips: can long paths carry the signal?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rankscope._citations import Cite
from rankscope.ext.papers._spec import Reproduction, Settings, Story, declare

if TYPE_CHECKING:
    from rankscope.runs.run import Run


def _run() -> Callable[[Settings], Run]:
    from rankscope.ext.papers.long_paths.run import measure

    return measure


def _show() -> Story:
    from rankscope.ext.papers.long_paths import show

    return show


ENTRY = Reproduction(
    run=_run,
    show=_show,
    name="long-paths",
    title="Can a network be made to use its long paths?",
    cites=(Cite("dong2021attention", "sec. 5"),),
    paper=(
        "Dong, Cordonnier and Loukas (2021, section 5) find that networks with skips behave like ensembles of shallow "
        "networks, in which short paths carry the signal. They leave open whether a network can be made to use its "
        "long paths."
    ),
    figure=(
        "Share of the output by path length for several skip gains, and accuracy and loss over the mean path length"
    ),
    minutes=10,
)
declare(ENTRY)
