"""Residual over depth in BERT, ALBERT and XLNet, with and without skips and MLPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rankscope._citations import Cite
from rankscope.ext.papers._spec import Reproduction, Settings, Story, declare

if TYPE_CHECKING:
    from rankscope.runs.run import Run


def _run() -> Callable[[Settings], Run]:
    from rankscope.ext.papers.dong2021_fig2.run import measure

    return measure


def _show() -> Story:
    from rankscope.ext.papers.dong2021_fig2 import show

    return show


ENTRY = Reproduction(
    run=_run,
    show=_show,
    name="dong2021-fig2",
    title="Attention alone loses rank; skips keep it (BERT, ALBERT, XLNet)",
    cites=(Cite("dong2021attention", "fig. 2"),),
    paper=(
        "Dong, Cordonnier and Loukas (2021, figure 2) measure the residual of the tokens, relative to their size, in "
        "BERT, ALBERT and XLNet at base size, at random initialisation and trained, on 32 sequences of 128 tokens. "
        "Without skips it falls to zero within a few blocks, MLPs slow the fall a little, and skips prevent it almost "
        "on their own."
    ),
    figure=(
        "Relative residual over depth at random initialisation, ours and the published means, as run by the authors "
        "and as stated in the theorem"
    ),
    checkpoints=("bert", "albert", "xlnet"),
    variants=("pure", "+mlp", "+skip", "full"),
    minutes=40,
)
declare(ENTRY)
