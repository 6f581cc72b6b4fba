"""A comparison of remedies as plain text: one line each, the one that keeps tokens furthest apart first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rankscope.runs.text import FLOOR_MARK, facts_line, floor_line, number

if TYPE_CHECKING:
    from rankscope.runs.run import Run

HEAD = ("remedy", "strength", "residual", "cosine", "factor", "QK/V gradient", "parameters", "time")
MEANING = (
    "residual: relative residual after the last block; cosine: mean cosine of tokens there; factor: of the residual "
    "per block; QK/V gradient: that of query and key weights over that of value weights, geometric mean over blocks; "
    "parameters: added; time: of a forward pass, against the same model under an operator that changes nothing."
)


def remedies_as_text(run: Run) -> str:
    """Verdict, table and legend."""
    entries = run.extra["remedies"]
    lines = [list(HEAD), *(cells(entry) for entry in entries)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    lines.insert(1, ["-" * width for width in widths])
    table = "\n".join(
        line[0].ljust(widths[0]) + "  " + "  ".join(w.rjust(n) for w, n in zip(line[1:], widths[1:], strict=True))
        for line in lines
    )
    stack = entries[0]["stack"]
    title = f"network: {run.extra['variant']}" + (f", {stack}" if stack else "")
    parts = [f"{run.kind}: {facts_line(run)}", f"Verdict: {run.verdict}", f"{title}\n{table}", MEANING]
    if any(entry["at_floor"] for entry in entries):
        parts.append(floor_line(run))
    parts += [f"Note: {note}" for note in run.notes]
    return "\n\n".join(part for part in parts if part)


def cells(entry: Mapping[str, Any]) -> list[str]:
    """One line of the table."""
    return [
        str(entry["name"]).partition("=")[0],
        _shown(entry.get("strength")),
        _shown(entry["residual_last"]) + (FLOOR_MARK if entry["at_floor"] else ""),
        _shown(entry["mean_cosine_last"]),
        _shown(entry["factor"]),
        _shown(entry["qk_over_v"]),
        f"{entry['parameters']:,}" if entry["parameters"] else "",
        "" if entry["time_ratio"] is None else f"{entry['time_ratio']:.2f}x",
    ]


def _shown(value: float | None) -> str:
    return "" if value is None else number(float(value))
