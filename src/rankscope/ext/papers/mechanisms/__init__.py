"""Token mixers from BERT to Mamba at one size: how fast each collapses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rankscope._citations import Cite
from rankscope.ext.papers._spec import Reproduction, Settings, Story, declare
from rankscope.ext.papers.mechanisms.rows import MECHANISMS

if TYPE_CHECKING:
    from rankscope.runs.run import Run


def _run() -> Callable[[Settings], Run]:
    from rankscope.ext.papers.mechanisms.run import measure

    return measure


def _show() -> Story:
    from rankscope.ext.papers.mechanisms import show

    return show


ENTRY = Reproduction(
    run=_run,
    show=_show,
    name="mechanisms",
    title="Three ways token mixers approach collapse: order 3, 1 and 0",
    cites=(Cite("dong2021attention", "thm. 2.2"), Cite("wu2024role", "thm. 1")),
    paper=(
        "Dong, Cordonnier and Loukas (2021, theorem 2.2) prove that complete softmax attention without skips and MLPs "
        "collapses doubly exponentially (order 3); Wu et al. (2024, theorem 1) prove that masked attention collapses "
        "at least exponentially. Neither covers other mechanisms, and we know of no published comparison."
    ),
    figure=(
        "Relative residual after the last block of each mechanism, with skips and without, coloured by its order near "
        "collapse"
    ),
    minutes=8,
    rows=tuple(MECHANISMS),
)
declare(ENTRY)
