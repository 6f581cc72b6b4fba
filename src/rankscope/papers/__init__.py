"""Papers: published figures and experiments, measured again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._deferred import names_of

if TYPE_CHECKING:
    from rankscope.papers.reproducing import reproduce, text_of

__all__ = [
    "reproduce",
    "text_of",
]

_HOME = {
    "reproduce": "rankscope.papers.reproducing",
    "text_of": "rankscope.papers.reproducing",
}

__getattr__ = names_of(__name__, _HOME)
