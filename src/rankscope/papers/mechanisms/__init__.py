"""The table of mechanisms: how fast each way of mixing tokens collapses, all at one size."""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope.papers._spec import declare
from rankscope.papers.mechanisms.rows import MECHANISMS

declare(
    __name__,
    name="mechanisms",
    title="Three ways to meet collapse: order 3, order 1, order 0",
    cites=(Cite("dong2021attention", "thm. 2.2"), Cite("wu2024role", "thm. 1")),
    paper=(
        "The first proves that complete softmax attention without skips and MLPs collapses doubly exponentially (order "
        "3), the second that masked attention collapses at least exponentially. Neither speaks of other mechanisms; no "
        "published table compares them."
    ),
    minutes=8,
    rows=tuple(MECHANISMS),
)
