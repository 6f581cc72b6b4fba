"""The tables of a run as words, with the course of each column or row: what a terminal and a notebook show.

Only kinds that are read over depth or length are here; another kind is shown as its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.runs.ablation import MEASURE, Arm, arms
from rankscope.runs.ablation_text import shown_layers
from rankscope.runs.decomposition import SHARE, by_length, columns_shown
from rankscope.runs.decomposition_text import HEADS_HEAD, HEADS_TITLE, head_rows, path_count
from rankscope.runs.exact_text import exact_rows
from rankscope.runs.exactness import exact_curves
from rankscope.runs.summary import Summary, shown_lines, stacks_of, summarise
from rankscope.runs.text import FLOOR_MARK, cell, number

if TYPE_CHECKING:
    from rankscope.runs.run import Run

Course = Sequence[float]
ELLIPSIS = "..."


@dataclass(frozen=True, eq=False)
class WordTable:
    """Words in rows, and the curves they are taken from.

    Attributes:
        title: what is shown, None where that is clear.
        head: name of each column.
        rows: one word per column.
        down: for each column its curve over the rows, None where it has none; empty if no column has one.
        across: for each row its curve over the columns; empty if no row has one.
    """

    title: str | None
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    down: tuple[Course | None, ...] = ()
    across: tuple[Course, ...] = ()


def grid_tables(run: Run) -> list[WordTable]:
    """Blocks down, headline metrics across, for each stack."""
    return [_grid_table(grid) for grid in (summarise(run.table) if run.table.num_rows else [])]


def _grid_table(grid: Summary) -> WordTable:
    columns = range(len(grid.metrics))
    rows = [
        (ELLIPSIS,) * (len(grid.metrics) + 1)
        if line is None
        else (grid.labels[line], *(cell(grid, line, column) for column in columns))
        for line in shown_lines(len(grid.labels))
    ]
    down = (None, *(grid.values[grid.blocks, column].tolist() for column in columns))
    return WordTable(grid.stack, ("block", *grid.metrics), tuple(rows), down=down)


def ablation_tables(run: Run) -> list[WordTable]:
    """Variants down, depth across, for each mask and kind of weights."""
    groups: dict[tuple[str, str, str | None], list[Arm]] = {}
    for arm in arms(run.table):
        groups.setdefault((arm.weights, arm.mask, arm.stack), []).append(arm)
    tables = []
    for (weights, mask, stack), members in groups.items():
        chosen = shown_layers(members[0].line.layers.size)
        head = ("variant", *(str(members[0].line.layers[i]) for i in chosen))
        rows = tuple(
            (
                arm.variant,
                *(number(float(arm.line.mean[i])) + FLOOR_MARK * bool(arm.line.any_floor[i]) for i in chosen),
            )
            for arm in members
        )
        facts = ", ".join(part for part in (stack, f"{weights} weights", f"{mask} mask") if part)
        courses = tuple(arm.line.mean.tolist() for arm in members)
        tables.append(WordTable(f"{MEASURE} at block.out, {facts}", head, rows, across=courses))
    return tables


def exact_tables(run: Run) -> list[WordTable]:
    """Blocks down; log10 of the residual in each arithmetic, then order and factor; for each stack."""
    tables = []
    for stack in stacks_of(run.table):
        head, rows = exact_rows(run, stack)
        curves = dict(exact_curves(run.table, "log10_residual", stack))
        for name in ("order", "factor", "linear_factor"):
            line = exact_curves(run.table, name, stack).get("exact")
            if line is not None:
                curves[name.replace("_", " ")] = line
        curves["relative"] = exact_curves(run.table, "log10_relative_residual", stack)["exact"]
        down = tuple(curves[name].mean.tolist() if name in curves else None for name in head)
        title = f"log10 of the residual at block.out{f', {stack}' if stack else ''}"
        tables.append(WordTable(title, tuple(head), tuple(map(tuple, rows)), down=down))
    return tables


def decomposition_tables(run: Run) -> list[WordTable]:
    """Path lengths down, what their paths amount to across, for each stack; then the heads, if they were asked for."""
    tables = []
    for stack in stacks_of(run.table):
        curves = {metric: by_length(run.table, metric, stack) for metric in columns_shown(run.table)}
        counts = run.extra.get("path_counts", {}).get(str(stack or ""), ())
        rows = []
        for length in curves[SHARE].lengths:
            words = []
            for line in curves.values():
                found = np.flatnonzero(line.lengths == length)
                words.append(number(float(line.mean[found[0]])) if found.size else "undefined")
            rows.append((str(length), path_count(counts, int(length)), *words))
        down = (None, None, *(line.mean.tolist() for line in curves.values()))
        title = ", ".join(part for part in (stack, f"MLPs {run.extra.get('convention')}") if part)
        tables.append(WordTable(title, ("length", "paths", *curves), tuple(rows), down=down))
        heads = head_rows(run, stack)
        if heads:
            tables.append(WordTable(HEADS_TITLE, tuple(HEADS_HEAD), tuple(map(tuple, heads))))
    return tables
