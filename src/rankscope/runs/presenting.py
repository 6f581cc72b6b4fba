"""A run as a document and as a figure, as its kind is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rankscope.errors import InputError, ResultError
from rankscope.runs.showing import show_of
from rankscope.views import Document
from rankscope.views.figures import draw, draw_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@contextmanager
def showing(*runs: Any) -> Iterator[None]:
    """Inside this context, a run read from a file whose facts have an unexpected shape raises a ResultError.

    What a verb stores with its rows has a shape of its own, which only the code that shows it knows. Errors about runs
    made in this process are ours and pass unchanged.

    Raises:
        ResultError: it names the folder.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        sources = [str(run.source) for run in runs if run.source is not None]
        if not sources:
            raise
        raise ResultError(
            f"{' or '.join(sources)} cannot be shown: its facts are not those that its verb writes "
            f"({type(error).__name__}: {error!s:.100}). It was edited, or written by another version; run it again."
        ) from error


def document_of(run: Any) -> Document:
    """The document behind every text output of the run: its tables, verdict and notes."""
    with showing(run):
        return show_of(run.kind).document(run)


def figure_of(
    run: Any,
    metrics: str | Sequence[str] | None = None,
    site: str | None = None,
    feature: str = "Run.plot",
    ax: Axes | None = None,
) -> Figure:
    """The run as a matplotlib figure, or its only panel in axes that are given.

    Raises:
        InputError: this kind has no figure, ``metrics`` or ``site`` was given and its figure does not take it, or
            ``ax`` was given and there is more than one panel.
        MissingExtraError: without matplotlib.
    """
    metrics = (metrics,) if isinstance(metrics, str) else metrics
    show = show_of(run.kind)
    if show.plot is None:
        raise InputError(f"A {run.kind!r} run has no figure.")
    if (metrics or site) and not show.has_choices:
        raise InputError(f"The figure of a {run.kind!r} run is one whole: plot() takes no metrics and no site.")
    with showing(run):
        chosen = {"metrics": metrics, "site": site} if show.has_choices else {}
        plotted = show.plot(run, **chosen)
        if ax is None:
            return draw(plotted, feature)
        if len(plotted.panels) != 1:
            choose = ": pass one metric, such as metrics='relative_residual'" if show.has_choices else ""
            raise InputError(f"This figure has {len(plotted.panels)} panels, and ax= takes one{choose}.")
        draw_panel(ax, plotted.panels[0])
        return ax.figure.figure  # that of a subfigure is the whole figure
