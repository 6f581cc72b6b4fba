"""Two points moved round a circle by one attention layer, applied again and again."""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope.papers._spec import declare

declare(
    __name__,
    name="dong2021-circle",
    title="One attention layer, again and again, loses the circle",
    cites=(Cite("dong2021attention", "sec. 4.3"),),
    paper=(
        "A single block with two heads is trained to send two opposing points of a circle one step further, and is "
        "then applied to its own output. Without skip and MLP the two trajectories meet; with either of them they do "
        "not, or later; a wider block takes longer."
    ),
    minutes=3,
)
