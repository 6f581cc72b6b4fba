"""Accuracy of paths of one length on three tasks: sorting, convex hull, memorisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rankscope._citations import Cite
from rankscope.ext.papers._spec import Reproduction, Settings, Story, declare

if TYPE_CHECKING:
    from rankscope.runs.run import Run

TASKS = {"sort": ("Learning to sort", 5), "hull": ("Convex hull", 7), "memory": ("Memorisation", 16)}
"""Title and minutes of each task."""


def _run() -> Callable[[Settings], Run]:
    from rankscope.ext.papers.dong2021_paths.run import measure

    return measure


def _show() -> Story:
    from rankscope.ext.papers.dong2021_paths import show

    return show


for _task, (_words, _minutes) in TASKS.items():
    _entry = Reproduction(
        run=_run,
        show=_show,
        name=f"dong2021-paths-{_task}",
        title=f"Do short paths carry the signal? {_words}",
        cites=(Cite("dong2021attention", "sec. 4.2"),),
        paper=(
            "Dong, Cordonnier and Loukas (2021, section 4.2) train networks of six attention layers with skips and "
            "LayerNorm and without MLPs, and evaluate random paths of one length at a time. Short paths keep most of "
            "the accuracy, even those of length 1 alone; paths through all six layers barely beat chance."
        ),
        figure=(
            "Accuracy by path length with attention frozen and recomputed, and size and residual of the sum of all "
            "paths of each length"
        ),
        minutes=_minutes,
    )
    declare(_entry)
