"""Residual over depth in BERT, ALBERT and XLNet, with and without skips and MLPs."""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope.papers._spec import declare

declare(
    __name__,
    name="dong2021-fig2",
    title="Attention alone loses rank; skips keep it (BERT, ALBERT, XLNet)",
    cites=(Cite("dong2021attention", "fig. 2"),),
    paper=(
        "The residual of the tokens, relative to their size, falls to zero within a few blocks when skips are removed; "
        "MLPs slow the fall a little; skips stop it almost by themselves. Shown for BERT, ALBERT and XLNet at base "
        "size, at random initialisation and trained, on 32 sequences of 128 tokens."
    ),
    checkpoints=("bert", "albert", "xlnet"),
    minutes=40,
)
