"""Which module describes what the result of each verb shows: one line per kind, imported when it is first needed.

A kind without a line is shown as ``measure`` shows its own: a grid of metrics by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope._deferred import resolve
from rankscope._errors import InputError
from rankscope.views import Document, Plot
from rankscope.views.figures import draw
from rankscope.views.notebook import document_html
from rankscope.views.text import document_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run


@dataclass(frozen=True)
class Presentation:
    """Which module of ``rankscope.runs`` describes a kind, by its functions ``document(run)`` and ``plot(run)``."""

    module: str
    choices: bool = False
    """Whether the plot takes ``metrics`` and ``site``."""


DEFAULT = Presentation("measure_show", choices=True)
PRESENTATIONS = {
    "ablate": Presentation("ablate_show", choices=True),
    "bound": Presentation("bound_show"),
    "decompose": Presentation("decompose_show"),
    "exact": Presentation("exact_show"),
    "predict": Presentation("predict_show"),
    "remedy": Presentation("remedy_show"),
}


def document_of(run: Run) -> Document:
    """What every text of the run shows: its tables, verdict and notes."""
    describe: Callable[[Run], Document] = resolve(f"runs.{presentation_of(run.kind).module}:document")
    return describe(run)


def text_of(run: Run) -> str:
    """The run as plain text."""
    return document_text(document_of(run))


def notebook_of(run: Run) -> str:
    """The run as HTML for a notebook."""
    return document_html(document_of(run))


def figure_of(run: Run, metrics: Sequence[str] | None = None, site: str | None = None) -> Figure:
    """The run as a matplotlib figure.

    Raises:
        InputError: for ``metrics`` or ``site`` where the figure of this kind has no choice of them.
        MissingExtraError: without matplotlib.
    """
    presentation = presentation_of(run.kind)
    plot: Callable[..., Plot] = resolve(f"runs.{presentation.module}:plot")
    if presentation.choices:
        return draw(plot(run, metrics=metrics, site=site))
    if metrics or site:
        raise InputError(f"The figure of a {run.kind!r} run is one whole: plot() takes no metrics and no site.")
    return draw(plot(run))


def presentation_of(kind: str) -> Presentation:
    """The views of a kind."""
    return PRESENTATIONS.get(kind, DEFAULT)
