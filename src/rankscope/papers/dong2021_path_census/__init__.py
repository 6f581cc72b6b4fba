"""Numbers and lengths of the paths through well-known transformers."""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope.papers._spec import declare

declare(
    __name__,
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
