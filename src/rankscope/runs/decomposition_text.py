"""A decomposition as plain text: lengths down, what their paths amount to across."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.runs.decomposition import SHARE, by_length, columns_shown, through_heads
from rankscope.runs.summary import stacks_of
from rankscope.runs.text import facts_line, number

if TYPE_CHECKING:
    from rankscope.runs.run import Run

MOST_HEADS = 8
HEADS_TITLE = "all paths through a head, the largest shares"
HEADS_HEAD = ["head", SHARE, "relative_residual"]


def decomposition_as_text(run: Run) -> str:
    """Verdict, then a table of lengths for each stack, and the heads whose paths carry most."""
    parts = [f"{run.kind}: {facts_line(run)}, MLPs {run.extra.get('convention')}", f"Verdict: {run.verdict}"]
    for stack in stacks_of(run.table):
        parts.append((f"{stack}\n" if stack else "") + _lengths(run, stack))
        heads = _heads(run, stack)
        if heads:
            parts.append(heads)
    parts += [f"Note: {note}" for note in run.notes]
    return "\n\n".join(parts)


def _lengths(run: Run, stack: str | None) -> str:
    metrics = list(columns_shown(run.table))
    curves = {metric: by_length(run.table, metric, stack) for metric in metrics}
    counts = run.extra.get("path_counts", {}).get(str(stack or ""), ())
    lengths = curves[SHARE].lengths
    head = ["length", "paths", *metrics]
    lines = [
        [str(k), path_count(counts, int(k)), *(_at(curves[m].lengths, curves[m].mean, k) for m in metrics)]
        for k in lengths
    ]
    return _table(head, lines)


def path_count(counts: tuple[str, ...], length: int) -> str:
    """How many paths have this length, in three digits; empty where that is not known."""
    return f"{float(counts[length]):.3g}" if length < len(counts) else ""


def _at(lengths: np.ndarray, values: np.ndarray, length: int) -> str:
    found = np.flatnonzero(lengths == length)
    return number(float(values[found[0]])) if found.size else "undefined"


def _heads(run: Run, stack: str | None) -> str:
    lines = head_rows(run, stack)
    return f"{HEADS_TITLE}\n{_table(HEADS_HEAD, lines)}" if lines else ""


def head_rows(run: Run, stack: str | None) -> list[list[str]]:
    """The heads whose paths carry the largest shares, under :data:`HEADS_HEAD`; none if they were not asked for."""
    share = through_heads(run.table, SHARE, stack)
    residual = through_heads(run.table, "relative_residual", stack)
    if not share.size:
        return []
    order = np.argsort(-np.nan_to_num(share), axis=None)[:MOST_HEADS]
    lines = []
    for flat in order:
        layer, head = np.unravel_index(flat, share.shape)
        apart = number(float(residual[layer, head])) if residual.size else ""
        lines.append([f"{layer}.{head}", number(float(share[layer, head])), apart])
    return lines


def _table(head: list[str], lines: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in [head, *lines]) for column in range(len(head))]
    rows = [head, ["-" * width for width in widths], *lines]
    return "\n".join("  ".join(w.rjust(n) for w, n in zip(row, widths, strict=True)) for row in rows)
