"""Tables, charts and sections described once, as data, and one renderer per medium.

A view describes what is shown, not how it looks::

    from rankscope.views import Cell, Column, Document, Line, LineChart, Plot, Section, Table, measured, number

    table = Table(
        [Column("variant", align="left"), "block 0", Column("block 1", trend=values)],
        [["pure", measured(0.6), measured(3e-8, floor=True)], None, ["full", measured(0.9), Cell("0.8", ("good",))]],
        caption="relative_residual at block.out",
    )
    document = Document("ablate: bert", verdict, parts=(table, Section("Why", "Because.", (table,))))
    plot = Plot("bert", verdict, (LineChart("relative residual", (Line("pure", x, y, low, high),), log=True),))

A cell's marks are data (``floor``, ``estimate``, ``apart``, ``good``, ``care``, ``bad``, ``faint``); ``str(cell)`` is
its text with their signs, the same in every medium. Nothing here imports torch, and no renderer reads text back.

================  ==============================================================================================
medium            renderer
================  ==============================================================================================
plain text        :func:`rankscope.views.text.document_text`, ``table_text``, ``markdown_text``
terminal (rich)   :func:`rankscope.views.terminal.print_document`, ``print_table``
notebook          :func:`rankscope.views.notebook.document_html`, ``table_html``
matplotlib        :func:`rankscope.views.figures.draw`
HTML page         :mod:`rankscope.reporting.page`
================  ==============================================================================================

Colours, markers and greys are those of :mod:`rankscope.views.palette`.
"""

from rankscope.views.charts import (
    BEFORE,
    BarChart,
    Guide,
    Line,
    LineChart,
    Note,
    Panel,
    Plot,
    Style,
    spans_decades,
)
from rankscope.views.documents import Document, Part, Remark, Section
from rankscope.views.tables import UNDEFINED, Cell, Column, Mark, Row, Table, measured, number

__all__ = [
    "BEFORE",
    "UNDEFINED",
    "BarChart",
    "Cell",
    "Column",
    "Document",
    "Guide",
    "Line",
    "LineChart",
    "Mark",
    "Note",
    "Panel",
    "Part",
    "Plot",
    "Remark",
    "Row",
    "Section",
    "Style",
    "Table",
    "measured",
    "number",
    "spans_decades",
]
