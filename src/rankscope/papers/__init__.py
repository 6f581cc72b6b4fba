"""Reproductions of published figures and our own experiments, one folder each.

A folder declares its reproduction in ``__init__.py`` (no torch), measures it in ``run.py`` and shows it in
``show.py``, which reads only the run, so that a saved run can be redrawn and described without measuring again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._deferred import names_of

if TYPE_CHECKING:
    from rankscope.papers.reproducing import reproduce, text_of, write_reproduction

__all__ = ["reproduce", "text_of", "write_reproduction"]

_HOME = dict.fromkeys(__all__, "rankscope.papers.reproducing")

__getattr__ = names_of(__name__, _HOME)
