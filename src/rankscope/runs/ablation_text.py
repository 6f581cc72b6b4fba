"""An ablation as plain text: variants down, depth across."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.runs.ablation import MEASURE, Arm, arms
from rankscope.runs.text import FLOOR_MARK, facts_line, floor_line, number, verdict_lines

if TYPE_CHECKING:
    from rankscope.runs.run import Run

MOST_LAYERS = 8


def ablation_as_text(run: Run) -> str:
    """Verdict, then a table of variants by block for each mask and kind of weights."""
    grid: dict[tuple[str, str, str | None], list[Arm]] = {}
    for arm in arms(run.table):
        grid.setdefault((arm.weights, arm.mask, arm.stack), []).append(arm)
    parts = [f"{run.kind}: {facts_line(run)}", verdict_lines(run)]
    for (weights, mask, stack), members in grid.items():
        title = ", ".join(part for part in (stack, f"{weights} weights", f"{mask} mask") if part)
        parts.append(f"{MEASURE} at block.out ({title})\n{_table(members)}")
    if any(bool(arm.line.any_floor.any()) for members in grid.values() for arm in members):
        parts.append(floor_line(run))
    parts += [f"Note: {note}" for note in run.notes]
    return "\n\n".join(part for part in parts if part)


def shown_layers(depth: int) -> list[int]:
    """At most eight positions spread over depth, the first and the last among them."""
    if depth <= MOST_LAYERS:
        return list(range(depth))
    return sorted({round(i * (depth - 1) / (MOST_LAYERS - 1)) for i in range(MOST_LAYERS)})


def _table(members: list[Arm]) -> str:
    chosen = shown_layers(members[0].line.layers.size)
    head = ["variant", *(f"block {members[0].line.layers[i]}" for i in chosen)]
    lines = [
        [
            arm.variant,
            *(number(float(arm.line.mean[i])) + (FLOOR_MARK if arm.line.any_floor[i] else "") for i in chosen),
        ]
        for arm in members
    ]
    widths = [max(len(row[column]) for row in [head, *lines]) for column in range(len(head))]
    return "\n".join(
        row[0].ljust(widths[0]) + "  " + "  ".join(w.rjust(n) for w, n in zip(row[1:], widths[1:], strict=True))
        for row in [head, ["-" * width for width in widths], *lines]
    )
