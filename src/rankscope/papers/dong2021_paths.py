"""How much of a task paths of one length solve: sorting, convex hull, memorisation."""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope._deferred import deferred
from rankscope.papers._recipe import RECIPES, Recipe

_PAPER = (
    "Trained networks of six attention layers, with skips and LayerNorm and without MLPs, are cut down to paths of one "
    "length: a few are drawn and averaged. Short paths keep most of the accuracy, length-one paths by themselves; "
    "paths through all six layers barely beat chance."
)
_TITLES = {
    "sort": "Do short paths carry the signal? Learning to sort",
    "hull": "Do short paths carry the signal? Convex hull",
    "memory": "Do short paths carry the signal? Memorisation",
}
_MINUTES = {"sort": 5, "hull": 7, "memory": 16}

for _task, _title in _TITLES.items():
    RECIPES.add(
        f"dong2021-paths-{_task}",
        Recipe(
            name=f"dong2021-paths-{_task}",
            title=_title,
            cites=(Cite("dong2021attention", "sec. 4.2"),),
            paper=_PAPER,
            measure=deferred(f"papers.dong2021.effectiveness:measure_{_task}"),
            draw=deferred("papers.dong2021.effectiveness_figure:draw_effectiveness"),
            describe=deferred("papers.dong2021.effectiveness_text:describe_effectiveness"),
            conclude=deferred("papers.dong2021.effectiveness_text:conclude_effectiveness"),
            minutes=_MINUTES[_task],
        ),
    )
