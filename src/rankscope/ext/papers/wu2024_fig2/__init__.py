"""Five networks under four masks, in float32 and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rankscope._citations import Cite
from rankscope.ext.papers._spec import Reproduction, Settings, Story, declare

if TYPE_CHECKING:
    from rankscope.runs.run import Run


def _run() -> Callable[[Settings], Run]:
    from rankscope.ext.papers.wu2024_fig2.run import measure

    return measure


def _show() -> Story:
    from rankscope.ext.papers.wu2024_fig2 import show

    return show


ENTRY = Reproduction(
    run=_run,
    show=_show,
    name="wu2024-fig2",
    title="Masks slow collapse; does LayerNorm stop it?",
    cites=(Cite("wu2024role", "fig. 2"),),
    paper=(
        "Wu, Ajorlou, Wang, Jegelka and Jadbabaie (2024, figure 2) find that mu(X) falls exponentially in BERT-base "
        "with pure attention under every mask, at different rates. LayerNorm alone keeps it from reaching zero at "
        "random initialisation; in the trained model this takes LayerNorm together with the other components."
    ),
    figure=(
        "mu, and mu over the norm of the tokens, for five networks under four masks, BERT-base at initialisation, in "
        "float32 and float64"
    ),
    checkpoints=("bert",),
    minutes=42,
)
declare(ENTRY)
