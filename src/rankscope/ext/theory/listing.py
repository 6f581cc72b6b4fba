"""``rankscope ls theorems``."""

from __future__ import annotations

from typing import Any

from rankscope.cli.listing import LISTINGS, Listing


def _theorems() -> list[dict[str, Any]]:
    from rankscope.ext.theory.theorems import THEOREMS

    return [
        {
            "name": entry.name,
            "statement": entry.statement,
            "hypotheses": list(entry.hypotheses),
            "sides": entry.sides,
            "summary": entry.summary,
            "cites": [str(cite) for cite in entry.cites],
        }
        for entry in THEOREMS.values()
    ]


LISTINGS.add("theorems", Listing(_theorems, ("name", "sides", "summary")))
