"""A matplotlib figure that a notebook displays automatically. Imports matplotlib: only drawing code may import this."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure with an image representation; under pyplot's inline backend, the backend's settings apply as usual."""

    def _repr_png_(self) -> bytes:
        picture = BytesIO()
        self.savefig(picture, format="png", dpi=110)
        return picture.getvalue()
