"""A run as Markdown for a model card: the verdict, the values at the first and last block, and the command."""

from __future__ import annotations

import re
import shlex

import numpy as np
import pyarrow as pa

from rankscope._foreign_text import visible
from rankscope.errors import ResultError
from rankscope.runs.provenance import Provenance
from rankscope.runs.summary import Summary, summarise
from rankscope.views import Table
from rankscope.views.text import markdown_text

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


def card_of(verdict: str, made: Provenance, table: pa.Table) -> str:
    """The card of a run whose rows are metrics by block, such as those of ``measure``.

    Raises:
        ResultError: the run has no values by block.
    """
    grids = [grid for grid in summarise(table) if grid.blocks.any()] if table.num_rows else []
    if not grids:
        raise ResultError("A card shows metrics by block, and this run has none.")
    version = made.versions.get("rankscope", "")
    parts = [
        f"### Rank collapse: {_escaped(made.subject)}",
        _escaped(verdict),
        *(_ends(grid) for grid in grids),
        f"Measured with rankscope {_escaped(version)} on {_escaped(made.created[:10])}, inputs: "
        f"{_escaped(made.inputs or 'unknown')}.",
    ]
    if made.command[:1] == ("rankscope",):
        parts.append(f"    $ {visible(shlex.join(made.command))}")
    return "\n\n".join(parts) + "\n"


def _ends(grid: Summary) -> str:
    """Each metric at the first and at the last block."""
    blocks = np.flatnonzero(grid.blocks)
    first, last = int(blocks[0]), int(blocks[-1])
    rows = [
        (f"`{metric}`", grid.cell(first, column), grid.cell(last, column)) for column, metric in enumerate(grid.metrics)
    ]
    table = markdown_text(Table(["metric", *(f"block {grid.labels[line]}" for line in (first, last))], rows))
    return table if grid.stack is None else f"{_escaped(grid.stack)}:\n\n{table}"


def _escaped(text: str) -> str:
    """``text`` that Markdown and HTML show as it is."""
    return _SPECIAL.sub(r"\\\1", " ".join(visible(text).split()))
