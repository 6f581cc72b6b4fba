"""How the result of each verb is written and drawn: one line per kind, imported when it is first needed.

A kind without a line is shown as ``measure`` shows its own: a grid of metrics by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope._deferred import resolve
from rankscope._errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run
    from rankscope.runs.tables import WordTable


@dataclass(frozen=True)
class Presentation:
    """Where the two views of a kind live, as ``module:function`` inside ``rankscope.runs``."""

    text: str
    figure: str
    choices: bool = False
    """Whether the figure takes ``metrics`` and ``site``."""
    tables: str | None = None
    """Where its tables with courses are made, for terminals and notebooks; None shows the text."""


DEFAULT = Presentation("text:as_text", "figure:draw", choices=True, tables="tables:grid_tables")
PRESENTATIONS = {
    "ablate": Presentation(
        "ablation_text:ablation_as_text", "ablation_figure:draw_ablation", choices=True, tables="tables:ablation_tables"
    ),
    "bound": Presentation("bound_text:bound_as_text", "bound_figure:draw_bound"),
    "decompose": Presentation(
        "decomposition_text:decomposition_as_text",
        "decomposition_figure:draw_decomposition",
        tables="tables:decomposition_tables",
    ),
    "exact": Presentation("exact_text:exact_as_text", "exact_figure:draw_exact", tables="tables:exact_tables"),
    "predict": Presentation("prediction_text:prediction_as_text", "prediction_figure:draw_prediction"),
    "remedy": Presentation("remedy_text:remedies_as_text", "remedy_figure:draw_remedies"),
}


def text_of(run: Run) -> str:
    """The run as plain text."""
    write: Callable[[Run], str] = resolve(f"runs.{presentation_of(run.kind).text}")
    return write(run)


def tables_of(run: Run) -> list[WordTable] | None:
    """The run as tables with the course of each column or row; None for a kind that has only its text."""
    place = presentation_of(run.kind).tables
    if place is None:
        return None
    make: Callable[[Run], list[WordTable]] = resolve(f"runs.{place}")
    return make(run)


def notebook_of(run: Run) -> str:
    """The run as HTML for a notebook."""
    write: Callable[[Run], str] = resolve("runs.notebook:as_html")
    return write(run)


def figure_of(run: Run, metrics: Sequence[str] | None = None, site: str | None = None) -> Figure:
    """The run as a matplotlib figure.

    Raises:
        InputError: for ``metrics`` or ``site`` where the figure of this kind has no choice of them.
    """
    presentation = presentation_of(run.kind)
    draw: Callable[..., Figure] = resolve(f"runs.{presentation.figure}")
    if presentation.choices:
        return shown(draw(run, metrics=metrics, site=site))
    if metrics or site:
        raise InputError(f"The figure of a {run.kind!r} run is one whole: plot() takes no metrics and no site.")
    return shown(draw(run))


def shown(figure: Figure) -> Figure:
    """The same figure as one that a notebook draws by itself, whether or not pyplot was imported."""
    from rankscope.runs.notebook_figure import NotebookFigure

    figure.__class__ = NotebookFigure
    return figure


def presentation_of(kind: str) -> Presentation:
    """The views of a kind."""
    return PRESENTATIONS.get(kind, DEFAULT)
