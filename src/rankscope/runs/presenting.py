"""What the run of each verb shows, as the verb declares it; see ``rankscope.verbs``.

A kind that is not a verb is shown as ``measure`` shows its own: a grid of metrics by layer.
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
    """A run, as far as this module needs to know it."""

    @property
    def kind(self) -> str:
        """The name of its verb."""


def document_of(run: Shown) -> Document:
    """What every text of the run shows: its tables, verdict and notes."""
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
        InputError: for ``metrics`` or ``site`` where the figure of this kind has no choice of them.
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
    """The views that the verb of this name declares, a :class:`rankscope.verbs._spec.Show`."""
    # Verbs are above this package; the registry is looked up when a run is shown, as any other place is.
    verbs = resolve("verbs._spec:VERBS")
    return verbs[kind].show if kind in verbs else resolve("verbs._spec:Show")()


def function_at(place: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function a declaration names."""
    found: Callable[..., Any] = place if callable(place) else resolve(place)
    return found
