"""The verbs: one folder each, declared in its ``__init__``; ``VERBS`` is their registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._deferred import names_of

if TYPE_CHECKING:
    from rankscope.verbs._spec import VERBS, Show, Verb, verb
    from rankscope.verbs.bound.judge import grid_of
    from rankscope.verbs.decompose.judge import through_heads
    from rankscope.verbs.exact.judge import exact_curves
    from rankscope.verbs.origin import floor_of, provenance_of
    from rankscope.verbs.reader import SiteReader

__all__ = [
    "VERBS",
    "Show",
    "SiteReader",
    "Verb",
    "exact_curves",
    "floor_of",
    "grid_of",
    "provenance_of",
    "through_heads",
    "verb",
]

_HOME = {
    "Show": "rankscope.verbs._spec",
    "SiteReader": "rankscope.verbs.reader",
    "VERBS": "rankscope.verbs._spec",
    "Verb": "rankscope.verbs._spec",
    "exact_curves": "rankscope.verbs.exact.judge",
    "floor_of": "rankscope.verbs.origin",
    "grid_of": "rankscope.verbs.bound.judge",
    "provenance_of": "rankscope.verbs.origin",
    "through_heads": "rankscope.verbs.decompose.judge",
    "verb": "rankscope.verbs._spec",
}

__getattr__ = names_of(__name__, _HOME)
