"""Small models trained with and without their parts: does training slow collapse down?"""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope.papers._spec import declare

declare(
    __name__,
    name="training-fights-collapse",
    title="Does training fight collapse?",
    cites=(Cite("dong2021attention", "sec. 4.1"), Cite("noci2022signal")),
    paper=(
        "Networks from which skips and MLPs were cut collapse doubly exponentially. They were cut after training, or "
        "never trained; had they been trained in that form, collapse would be expected to be slower. At collapse the "
        "gradients of queries and keys vanish, so that nothing could bring attention back."
    ),
    minutes=10,
)
