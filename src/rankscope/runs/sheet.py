"""An empty figure in our style: where every figure of a result begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rankscope._errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = {"font.size": 8.5, "font.family": "DejaVu Sans", "axes.linewidth": 0.7, "hatch.linewidth": 0.5}


@contextmanager
def sheet(asked_by: str, width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches; what is drawn inside the block is drawn in our style, and pyplot is not touched.

    Args:
        asked_by: what the reader called, for the message.
        width: in inches.
        height: in inches.

    Raises:
        MissingExtraError: without matplotlib.
    """
    with drawing_style(asked_by, STYLE):
        from matplotlib.figure import Figure

        yield Figure(figsize=(width, height))


@contextmanager
def drawing_style(asked_by: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Matplotlib's own defaults and these settings, for drawing and for saving.

    A file ``matplotlibrc`` in the current folder changes the defaults, and one of its settings runs LaTeX.

    Args:
        asked_by: what the reader called, for the message.
        settings: by name, over the defaults.

    Raises:
        MissingExtraError: without matplotlib.
    """
    try:
        import matplotlib.figure  # noqa: F401  (what is drawn inside needs it)
        from matplotlib.style import context
    except ImportError as error:
        raise MissingExtraError(asked_by, "matplotlib", "plot") from error
    with context(["default", dict(settings)]):
        yield
