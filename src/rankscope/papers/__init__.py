"""Reproductions of published figures and our own experiments, one folder each.

A folder declares its reproduction in ``__init__.py`` (no torch), measures it in ``run.py`` and shows it in
``show.py``, which reads nothing but the run, so that a saved run can be drawn and described again.
"""

from rankscope.papers.reproducing import reproduce, text_of, write_reproduction

__all__ = ["reproduce", "text_of", "write_reproduction"]
