"""The verbs: one folder each, declared in its ``__init__``; ``VERBS`` is their registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._lazy import names_of

if TYPE_CHECKING:
    from rankscope.runs.showing import Show
    from rankscope.verbs._spec import VERBS, Verb, verb
    from rankscope.verbs.calling import checked
    from rankscope.verbs.exact.judge import exact_curves
    from rankscope.verbs.origin import floor_of, provenance_of
    from rankscope.verbs.reader import SiteReader

__all__ = [
    "VERBS",
    "Show",
    "SiteReader",
    "Verb",
    "checked",
    "exact_curves",
    "floor_of",
    "provenance_of",
    "verb",
]

__getattr__ = names_of(__name__)
