"""Reproductions of published figures and our own experiments, one folder each.

A folder declares its reproduction in ``__init__.py`` (no torch), measures it in ``run.py`` and shows it in
``show.py``, which reads only the run, so that a saved run can be redrawn and described without measuring again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._lazy import names_of
from rankscope.extensions import Extension

if TYPE_CHECKING:
    from rankscope.ext.papers.reproducing import reproduce, text_of, write_reproduction

__all__ = ["reproduce", "text_of", "write_reproduction"]

__getattr__ = names_of(__name__)


def _commands() -> None:
    from rankscope.ext.papers import command  # noqa: F401 registers it


def _reproduce() -> object:
    from rankscope.ext.papers.reproducing import reproduce

    return reproduce


EXTENSION = Extension(
    name="papers",
    summary="reproduce: published figures and our own experiments, measured again.",
    requires=("paths", "theory"),
    adds={"command": _commands},
    names={"reproduce": _reproduce},
)
