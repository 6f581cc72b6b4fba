"""Accuracy of paths of one length on three tasks: sorting, convex hull, memorisation."""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope.papers._spec import declare

TASKS = {"sort": ("Learning to sort", 5), "hull": ("Convex hull", 7), "memory": ("Memorisation", 16)}
"""Title and minutes of each task."""

for _task, (_words, _minutes) in TASKS.items():
    declare(
        __name__,
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
