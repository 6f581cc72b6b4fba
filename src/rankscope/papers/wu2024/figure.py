"""The figure again, with the scale-free partner of mu below it and both float formats in each panel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rankscope.papers._drawing import (
    INK,
    Style,
    draw_line,
    figure_with_head,
    legend_below,
    settle_axes,
    settle_log_axes,
)
from rankscope.papers._lines import has_line, line
from rankscope.runs.curves import names_in
from rankscope.views import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

MASK_STYLES: Mapping[str, Style] = {
    "complete": Style("#000000", "o", "complete"),
    "causal": Style("#D55E00", "s", "causal"),
    "window(1)": Style("#0072B2", "^", "window ±1"),
    "causal_window(1)": Style("#009E73", "D", "causal window 1"),
}
FLOORS = {"float32": 4 * float(np.finfo(np.float32).eps), "float64": 4 * float(np.finfo(np.float64).eps)}
LEAST = 1e-19
LEAST_DECADES = 2.2
MEASURES = {"mu": "μ(X)", "mu_over_norm": "μ(X) / ‖X‖"}
VARIANTS = ("SAN", "SAN+skip", "SAN+LN", "SAN+LN+skip", "transformer")
TITLES = {"BERT": "BERT-base", "minilm": "MiniLM (BERT, 6 blocks)", "reaction-bert": "rxnfp (BERT, 12 blocks)"}
NOTE = "Solid: float64. Dotted: float32, where the two part. Below 1e-19, drawn there."


def draw_figure(run: Run) -> dict[str, Figure]:
    """``figure`` (initialisation), one figure per trained model, ``figure-temperature`` and ``figure-deep``."""
    drawn = {
        "figure": _grid(run, "BERT", "init", "figure", VARIANTS, f"Networks and masks: {_named(run)} at initialisation")
    }
    for name in names_in(run.table, "model"):
        if has_line(run.table, model=name, weights="trained"):
            title = f"Networks and masks: {TITLES.get(name, name)}, trained"
            drawn[f"figure-{name.lower()}"] = _grid(run, name, "trained", "figure", VARIANTS, title)
    if has_line(run.table, part="deep"):
        variants = [name for name in VARIANTS if has_line(run.table, part="deep", variant=name)]
        deepest = line(run.table, "mu", part="deep", variant="SAN", mask="complete", dtype="float64").depth[-1]
        drawn["figure-deep"] = _grid(run, "BERT", "init", "deep", variants, f"The same at {deepest} blocks")
    if has_line(run.table, part="temperature"):
        drawn["figure-temperature"] = _temperatures(run)
    return drawn


def _named(run: Run) -> str:
    where = {"part": "figure", "model": "BERT", "weights": "init"}
    depth = int(line(run.table, "mu", **where, variant="SAN", mask="complete").depth[-1])
    return "BERT-base" if depth == 12 else f"a tiny BERT ({depth} blocks)"


def _grid(run: Run, model: str, weights: str, part: str, variants: Sequence[str], title: str) -> Figure:
    figure, grid = figure_with_head(
        2, len(variants), title, f"Log-log, from the end of the first block. {NOTE}", panel=(2.5, 2.3)
    )
    for row, (metric, label) in enumerate(MEASURES.items()):
        for column, variant in enumerate(variants):
            axes = grid[row][column]
            where = {"part": part, "model": model, "weights": weights, "variant": variant, "temperature": "1"}
            deepest = _masks(axes, run, metric, where)
            axes.set_title(variant if row == 0 else "", size=9.5, color=INK)
            axes.set_ylabel(label if column == 0 else "")
            axes.set_xlabel("block" if row == 1 else "")
            _settle(axes, deepest, relative=metric == "mu_over_norm", labelled=column == len(variants) - 1)
    legend_below(figure, [MASK_STYLES[mask] for mask in masks_in(run)])
    return figure


def masks_in(run: Run) -> list[str]:
    """Masks the run holds, in our order."""
    held = names_in(run.table, "mask")
    return [mask for mask in MASK_STYLES if mask in held]


def _masks(axes: Axes, run: Run, metric: str, where: Mapping[str, str | int]) -> int:
    deepest = 1
    for mask, style in MASK_STYLES.items():
        for dtype in ("float64", "float32"):
            if not has_line(run.table, **where, mask=mask, dtype=dtype):
                continue
            seen = line(run.table, metric, **where, mask=mask, dtype=dtype)
            keep = seen.depth >= 1
            deepest = max(deepest, int(seen.depth[-1]))
            if dtype == "float64":
                draw_line(axes, seen.depth[keep], seen.mean[keep], None, style, least=LEAST)
            else:
                level = np.maximum(seen.mean[keep], LEAST)
                axes.plot(seen.depth[keep], level, color=style.colour, linestyle=":", linewidth=1.3, zorder=2)
    return deepest


def _settle(axes: Axes, deepest: int, *, relative: bool, labelled: bool) -> None:
    axes.set_yscale("log")
    settle_log_axes(axes, deepest)
    if not relative:
        _widen(axes)
    else:
        axes.set_ylim(LEAST, 3.0)
        for dtype, floor in FLOORS.items():
            axes.axhline(floor, color="#777777", linewidth=0.7, linestyle=(0, (1, 1.5)), zorder=1)
            if labelled:
                axes.text(1.0, floor, f"{dtype} rounding", va="bottom", size=6.5, color="#444444")


def _widen(axes: Axes) -> None:
    """Show two powers of ten at least, so that the axis has numbers and a small change looks small."""
    low, high = axes.get_ylim()
    missing = max(0.0, LEAST_DECADES - np.log10(high / low)) / 2
    axes.set_ylim(low / 10**missing, high * 10**missing)


def _temperatures(run: Run) -> Figure:
    variants = [name for name in VARIANTS if has_line(run.table, part="temperature", variant=name)]
    masks = [mask for mask in MASK_STYLES if has_line(run.table, part="temperature", mask=mask)]
    figure, grid = figure_with_head(
        len(variants),
        len(masks),
        f"Attention temperature: scores divided by T, {_named(run)} at initialisation, float64",
        "Small T makes attention sharper.",
    )
    temperatures = sorted(names_in(run.table, "temperature"), key=float)
    shades = [
        Style(_shade(i / max(1, len(temperatures) - 1)), "osD^vP"[i % 6], f"T = {t}")
        for i, t in enumerate(temperatures)
    ]
    for row, variant in enumerate(variants):
        for column, mask in enumerate(masks):
            axes = grid[row][column]
            deepest = 1
            for temperature, style in zip(temperatures, shades, strict=True):
                where = {"part": "temperature", "variant": variant, "mask": mask, "temperature": temperature}
                if has_line(run.table, **where):
                    seen = line(run.table, "mu_over_norm", **where)
                    deepest = int(seen.depth[-1])
                    draw_line(axes, seen.depth, seen.mean, None, style, least=LEAST)
            axes.set_yscale("log")
            axes.set_ylim(LEAST, 3.0)
            settle_axes(axes, deepest)
            axes.set_title(f"{variant}, {MASK_STYLES[mask].label} mask", size=9.5, color=INK)
            axes.set_ylabel(MEASURES["mu_over_norm"] if column == 0 else "")
            axes.set_xlabel("block" if row == len(variants) - 1 else "")
            axes.axhline(FLOORS["float64"], color="#777777", linewidth=0.7, linestyle=(0, (1, 1.5)), zorder=1)
            if column == len(masks) - 1:
                words = f"float64 rounding, below {number(FLOORS['float64'])}"
                axes.text(deepest, FLOORS["float64"], words, ha="right", va="bottom", size=6.5, color="#444444")
    legend_below(figure, shades)
    return figure


def _shade(share: float) -> str:
    """From dark blue (sharp) to orange (flat), of growing lightness."""
    dark, light = np.array([0x08, 0x30, 0x6B]), np.array([0xF2, 0x9E, 0x4C])
    red, green, blue = (round(float(a + share * (b - a))) for a, b in zip(dark, light, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"
