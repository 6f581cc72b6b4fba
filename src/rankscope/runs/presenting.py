"""How the run of each verb is written and drawn, as its declaration says; see ``rankscope.verbs``.

A kind that is not a verb is shown as ``measure`` shows its own: a grid of metrics by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rankscope._deferred import resolve
from rankscope._errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run
    from rankscope.runs.tables import WordTable


def text_of(run: Run) -> str:
    """The run as plain text."""
    return str(function_at(show_of(run.kind).text)(run))


def tables_of(run: Run) -> list[WordTable] | None:
    """The run as tables with the course of each column or row; None for a kind that has only its text."""
    place = show_of(run.kind).tables
    if place is None:
        return None
    made: list[WordTable] = function_at(place)(run)
    return made


def notebook_of(run: Run) -> str:
    """The run as HTML for a notebook."""
    write: Callable[[Run], str] = resolve("runs.notebook:as_html")
    return write(run)


def figure_of(run: Run, metrics: Sequence[str] | None = None, site: str | None = None) -> Figure:
    """The run as a matplotlib figure.

    Raises:
        InputError: for ``metrics`` or ``site`` where the figure of this kind has no choice of them.
    """
    show = show_of(run.kind)
    draw: Callable[..., Figure] = function_at(show.figure)
    if show.has_choices:
        return shown(draw(run, metrics=metrics, site=site))
    if metrics or site:
        raise InputError(f"The figure of a {run.kind!r} run is one whole: plot() takes no metrics and no site.")
    return shown(draw(run))


def shown(figure: Figure) -> Figure:
    """The same figure as one that a notebook draws by itself, whether or not pyplot was imported."""
    from rankscope.runs.notebook_figure import NotebookFigure

    figure.__class__ = NotebookFigure
    return figure


def show_of(kind: str) -> Any:
    """The views that the verb of this name declares, a :class:`rankscope.verbs._spec.Show`."""
    # Verbs are above this package; the registry is looked up when a run is shown, as any other place is.
    verbs = resolve("verbs._spec:VERBS")
    return verbs[kind].show if kind in verbs else resolve("verbs._spec:Show")()


def function_at(place: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function a declaration names."""
    found: Callable[..., Any] = place if callable(place) else resolve(place)
    return found
