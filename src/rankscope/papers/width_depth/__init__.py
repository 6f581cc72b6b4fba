"""Which designs train, over depth, width, heads and skip gain, compared with the prediction before training."""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope.papers._spec import declare

declare(
    __name__,
    name="width-depth",
    title="Does the prediction at initialisation tell which corner trains?",
    cites=(Cite("dong2021attention"),),
    paper=(
        "Attention pulls tokens together, skips and MLPs hold them apart; what this tug-of-war means for the choice of "
        "width and depth is left open."
    ),
    minutes=12,
)
