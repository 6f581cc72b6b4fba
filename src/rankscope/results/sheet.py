"""An empty figure in our style: where every figure of a result begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

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
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(asked_by, "matplotlib", "plot") from error
    with rc_context(STYLE):
        yield Figure(figsize=(width, height))
