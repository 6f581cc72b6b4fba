"""How each kind of run is shown, as registered by whoever makes it; verbs register theirs when they are declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankscope._registry import Registry

if TYPE_CHECKING:  # declarations of verbs import this module, and they must not import numpy
    from rankscope.views import Document, Plot

ANY = "*"
"""The name of the view of all runs whose kind nobody registered."""


@dataclass(frozen=True, kw_only=True)
class Show:
    """How a result is printed and plotted.

    Attributes:
        document: its tables, verdict and notes, for print, terminal and notebook.
        plot: its figure; None if it has none.
        has_choices: whether ``plot`` takes ``metrics`` and ``site``.
    """

    document: Callable[[Any], Document]
    plot: Callable[..., Plot] | None = None
    has_choices: bool = False


VIEWS: Registry[Callable[[], Show]] = Registry("view")
"""By kind, a function that imports and returns how such a run is shown."""


def show_of(kind: str) -> Show:
    """How runs of this kind are shown."""
    return VIEWS[kind if kind in VIEWS else ANY]()
