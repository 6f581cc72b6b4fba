"""A matplotlib figure that a notebook draws by itself. Imports matplotlib: only what draws may import this."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure with a picture of its own; with pyplot's inline backend, that one's settings count as ever."""

    def _repr_png_(self) -> bytes:
        picture = BytesIO()
        self.savefig(picture, format="png", dpi=110)
        return picture.getvalue()
