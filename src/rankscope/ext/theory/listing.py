"""``rankscope ls theorems``."""

from __future__ import annotations

from typing import Any

from rankscope.cli.listing import LISTINGS, Listing, facts_of


def _theorems() -> list[dict[str, Any]]:
    from rankscope.ext.theory.theorems import THEOREMS

    names = ("name", "statement", "hypotheses", "sides", "summary", "cites")
    return [facts_of(entry, *names) for entry in THEOREMS.values()]


LISTINGS.add("theorems", Listing(_theorems, ("name", "sides", "summary")))
