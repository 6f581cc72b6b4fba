"""How many paths there are, and how long they are: exact, in whole numbers."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from rankscope.papers._drawing import INK, Style, figure_with_head, settle_axes
from rankscope.papers._lines import select
from rankscope.papers._published import published
from rankscope.papers._recipe import Settings
from rankscope.runs.curves import names_in
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARE, COUNT = "path_share", "path_count"
SHORT = 6
STYLES = (
    Style("#000000", "o", ""),
    Style("#D55E00", "s", ""),
    Style("#0072B2", "^", ""),
    Style("#009E73", "D", ""),
    Style("#CC79A7", "v", ""),
)


def path_counts(heads: int, blocks: int) -> list[int]:
    r"""Paths of each length in a network with skips, from 0 up: :math:`\binom{L}{k} H^k`.

    **Exact**; whole numbers of any size.

    Example:
        >>> path_counts(heads=2, blocks=2)
        [1, 4, 4]
    """
    return [math.comb(blocks, length) * heads**length for length in range(blocks + 1)]


def measure_census(settings: Settings) -> Run:
    """Counts and shares by length for every listed model; the first three at small size."""
    writer = RowWriter(coordinates=("model", "heads", "blocks", "seed"))
    models = published("dong2021_path_census")["models"]
    for entry in models[:3] if settings.small else models:
        counts = path_counts(entry["heads"], entry["blocks"])
        total = sum(counts)
        for length, count in enumerate(counts):
            for metric, value in ((SHARE, float(Fraction(count, total))), (COUNT, float(count))):
                writer.add(
                    metric=metric,
                    site="paths",
                    stack=None,
                    layer=length,
                    first_sequence=0,
                    values=np.array([value]),
                    statuses=np.array([0]),
                    head_axis=False,
                    at={**entry, "seed": 0},
                )
    return Run(
        kind="reproduce:dong2021-path-census",
        provenance=Provenance(model="(heads, blocks) of published models", origin="published"),
        floor={"dtype": None, "relative": None, "meaning": "whole numbers; nothing is rounded before it is stored"},
        verdict="",
        table=writer.table(),
    )


def _shares(run: Run, model: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Lengths, shares, and the number of heads."""
    rows = select(run.table, {"metric": SHARE, "model": model})
    return rows["layer"].to_numpy(), rows["value"].to_numpy(), int(rows["heads"][0].as_py())


def draw_census(run: Run) -> dict[str, Figure]:
    """Share of paths by length, and the share at most so long."""
    figure, grid = figure_with_head(
        1,
        2,
        "How long are the paths of a transformer with skips?",
        "Each block is passed over or entered through one of H heads, so lengths follow a binomial law with "
        "chance H/(1+H).",
    )
    left, right = grid[0]
    shown = [name for name in names_in(run.table, "model") if int(_shares(run, name)[0].size) <= 33]
    shown = shown if len(shown) <= len(STYLES) else [shown[i] for i in (0, 1, 3, 4, 5)]
    for style, name in zip(STYLES, shown, strict=False):
        length, share, heads = _shares(run, name)
        label = f"{name} ({heads}, {length[-1]})"
        left.plot(length, share, color=style.colour, marker=style.marker, markersize=3.2, linewidth=1.3, label=label)
        right.plot(length, np.cumsum(share), color=style.colour, marker=style.marker, markersize=3.2, linewidth=1.3)
    left.set_ylabel("share of all paths")
    right.set_ylabel("share of paths at most so long")
    right.set_yscale("log")
    right.set_ylim(1e-12, 2)
    for axes in (left, right):
        axes.set_xlabel("length of the path (blocks entered)")
        settle_axes(axes, int(axes.get_xlim()[1]))
    left.set_ylim(-0.02, 1.02)
    left.legend(
        loc="upper right",
        frameon=False,
        fontsize=7.2,
        labelcolor=INK,
        title="model (heads, blocks)",
        title_fontsize=7.2,
    )
    return {"figure": figure}


def describe_census(run: Run) -> str:
    """A table of totals, mean lengths and the share of short paths."""
    lines = [
        f"| model | heads | blocks | paths | mean length | share of length {SHORT} or less |",
        "|---|---|---|---|---|---|",
    ]
    for name in names_in(run.table, "model"):
        length, share, heads = _shares(run, name)
        total = float(select(run.table, {"metric": COUNT, "model": name})["value"].to_numpy().sum())
        mean, short = float((length * share).sum()), float(share[length <= SHORT].sum())
        lines.append(f"| {name} | {heads} | {length[-1]} | {total:.3g} | {mean:.2f} | {short:.2g} |")
    return (
        "**What we see.** Counted in whole numbers:\n\n"
        + "\n".join(lines)
        + "\n\n**Where it differs.** Nowhere: this is "
        "arithmetic. It does say that short paths, which carry what attention keeps of the tokens' differences, "
        "are a "
        "vanishing share of all paths; how much they carry is not a matter of counting."
    )


def conclude_census(run: Run) -> str:
    """One sentence."""
    name = names_in(run.table, "model")[-1]
    length, share, _ = _shares(run, name)
    return f"{name}: the mean path enters {(length * share).sum():.2f} of {length[-1]} blocks."
