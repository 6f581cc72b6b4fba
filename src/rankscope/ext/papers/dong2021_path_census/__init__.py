"""Numbers and lengths of the paths through well-known transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rankscope._citations import Cite
from rankscope.ext.papers._spec import Reproduction, Settings, Story, declare

if TYPE_CHECKING:
    from rankscope.runs.run import Run


def _run() -> Callable[[Settings], Run]:
    from rankscope.ext.papers.dong2021_path_census.run import measure

    return measure


def _show() -> Story:
    from rankscope.ext.papers.dong2021_path_census import show

    return show


ENTRY = Reproduction(
    run=_run,
    show=_show,
    name="dong2021-path-census",
    title="Most paths through a transformer are long",
    cites=(Cite("dong2021attention", "thm. 2.1"),),
    paper=(
        "Dong, Cordonnier and Loukas (2021, theorem 2.1) write a network of L blocks with H heads and skips as a sum "
        "over paths, of which C(L,k) H^k pass through k blocks. Long paths converge to rank one, so the few short ones "
        "should matter most."
    ),
    figure="Share of paths by length for five transformers",
)
declare(ENTRY)
