"""A comparison as plain text: blocks down, metrics across."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope.runs.summary import headline, main_site, shown_lines
from rankscope.runs.text import number

if TYPE_CHECKING:
    from rankscope.runs.comparison import Comparison

APART = "*"
MOST_METRICS = 5


def comparison_as_text(comparison: Comparison) -> str:
    """Verdict, then for the headline metrics the difference and its interval by block."""
    level = f"{comparison.settings['level']:.0%}"
    how = "paired" if comparison.paired else "not paired"
    parts = [
        f"a: {comparison.a}\nb: {comparison.b}",
        f"Verdict: {comparison.verdict}",
        f"b - a with {level} intervals over sequences, {how} ({comparison.settings['why']}); "
        f"{APART} where the interval leaves out zero",
    ]
    chosen = headline(comparison.table, MOST_METRICS)
    for name, table in difference_groups(comparison.table):
        rows = difference_rows(table, chosen)
        if len(rows) > 1:
            parts.append((f"{name}\n" if name else "") + _aligned(rows))
    return "\n\n".join(parts)


def difference_groups(table: pa.Table) -> list[tuple[str, pa.Table]]:
    """Rows of each stack and combination of the verb's own columns, with a name."""
    own = ["stack", *table.column_names[4 : table.column_names.index("a")]]
    keys = dict.fromkeys(zip(*(table[name].to_pylist() for name in own), strict=True))
    found = []
    for key in keys:
        here = table
        for name, value in zip(own, key, strict=True):
            match = pc.is_null(here[name]) if value is None else pc.fill_null(pc.equal(here[name], value), False)
            here = here.filter(match)
        found.append((", ".join(str(value) for value in key if value is not None), here))
    return found


def difference_rows(table: pa.Table, metrics: Sequence[str]) -> list[list[str]]:
    """Head and rows: block, then for each metric at its main site the difference with its interval."""
    columns: dict[str, dict[int, str]] = {}
    for metric in metrics:
        rows = table.filter(pc.equal(table["metric"], metric))
        if rows.num_rows:
            site = main_site(rows, metric)
            here = rows.filter(pc.equal(rows["site"], site))
            columns[f"{metric}@{site}"] = {int(row["layer"]): words_of(row) for row in here.to_pylist()}
    layers = sorted({layer for column in columns.values() for layer in column})
    lines = [["block", *columns]]
    for place in shown_lines(len(layers)):
        layer = None if place is None else layers[place]
        lines.append(["..."] * len(lines[0]) if layer is None else
                     [str(layer), *(column.get(layer, "") for column in columns.values())])  # fmt: skip
    return lines


def words_of(row: dict[str, Any]) -> str:
    """One difference with its interval."""
    difference = number(float(row["difference"]))
    if not (np.isfinite(row["low"]) and np.isfinite(row["high"])):
        return difference
    mark = APART if row["low"] > 0 or row["high"] < 0 else ""
    return f"{difference}{mark} [{number(float(row['low']))}, {number(float(row['high']))}]"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    ruled = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return "\n".join("  ".join(w.rjust(n) for w, n in zip(line, widths, strict=True)).rstrip() for line in ruled)
