"""Can training make long paths carry the signal?"""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope.papers._spec import declare

declare(
    __name__,
    name="long-paths",
    title="Can a network be made to use its long paths?",
    cites=(Cite("dong2021attention", "sec. 5"),),
    paper=(
        "Networks with skips work like ensembles of shallow ones: short paths carry the signal. The authors leave open "
        "whether a network can be made to use its long paths."
    ),
    minutes=10,
)
