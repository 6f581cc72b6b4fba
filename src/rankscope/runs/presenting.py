"""How the run of each verb is shown, as declared by the verb; see ``rankscope.verbs``.

A kind that is not a verb is shown like a ``measure`` run: a grid of metrics by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rankscope._deferred import resolve
from rankscope.errors import InputError
from rankscope.views import Document, Plot
from rankscope.views.figures import draw
from rankscope.views.notebook import document_html
from rankscope.views.text import document_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Shown(Protocol):
    """The part of a run that this module needs."""

    @property
    def kind(self) -> str:
        """The name of its verb."""


def document_of(run: Shown) -> Document:
    """The document behind every text output of the run: its tables, verdict and notes."""
    describe: Callable[[Shown], Document] = function_at(show_of(run.kind).document)
    return describe(run)


def text_of(run: Shown) -> str:
    """The run as plain text."""
    return document_text(document_of(run))


def notebook_of(run: Shown) -> str:
    """The run as HTML for a notebook."""
    return document_html(document_of(run))


def figure_of(run: Shown, metrics: Sequence[str] | None = None, site: str | None = None) -> Figure:
    """The run as a matplotlib figure.

    Raises:
        InputError: ``metrics`` or ``site`` was given, and the figure of this kind does not take it.
        MissingExtraError: without matplotlib.
    """
    show = show_of(run.kind)
    plot: Callable[..., Plot] = function_at(show.plot)
    if show.has_choices:
        return draw(plot(run, metrics=metrics, site=site))
    if metrics or site:
        raise InputError(f"The figure of a {run.kind!r} run is one whole: plot() takes no metrics and no site.")
    return draw(plot(run))


def show_of(kind: str) -> Any:
    """The views declared by the verb of this name, a :class:`rankscope.verbs._spec.Show`."""
    # Verbs are a layer above this package, so their registry is imported only when a run is shown.
    verbs = resolve("verbs._spec:VERBS")
    return verbs[kind].show if kind in verbs else resolve("verbs._spec:Show")()


def function_at(place: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function a declaration names."""
    found: Callable[..., Any] = place if callable(place) else resolve(place)
    return found
