"""How much of a task paths of one length solve: sorting, convex hull, memorisation."""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope.papers._spec import declare

TASKS = {"sort": ("Learning to sort", 5), "hull": ("Convex hull", 7), "memory": ("Memorisation", 16)}
"""What each task is called, and how many minutes it takes."""

for _task, (_words, _minutes) in TASKS.items():
    declare(
        __name__,
        name=f"dong2021-paths-{_task}",
        title=f"Do short paths carry the signal? {_words}",
        cites=(Cite("dong2021attention", "sec. 4.2"),),
        paper=(
            "Trained networks of six attention layers, with skips and LayerNorm and without MLPs, are cut down to "
            "paths of one length: a few are drawn and averaged. Short paths keep most of the accuracy, length-one "
            "paths by themselves; paths through all six layers barely beat chance."
        ),
        minutes=_minutes,
    )
