"""How each kind of run is shown, as registered by whoever makes it; verbs register theirs when they are declared."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
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
    """

    document: Callable[[Any], Document]
    plot: Callable[..., Plot] | None = None

    @property
    def has_choices(self) -> bool:
        """Whether ``plot`` takes ``metrics`` and ``site``."""
        return self.plot is not None and "site" in inspect.signature(self.plot).parameters


VIEWS: Registry[str] = Registry("view")
"""By kind, the module that shows such a run."""


def shown_by(module: str) -> Show:
    """The ``document`` of a module, and its ``plot`` if it has one."""
    found = import_module(module)
    return Show(document=found.document, plot=getattr(found, "plot", None))


def show_of(kind: str) -> Show:
    """How runs of this kind are shown."""
    return shown_by(VIEWS[kind if kind in VIEWS else ANY])
