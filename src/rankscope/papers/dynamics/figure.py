"""Residual, gradients and loss over training, for networks with and without their parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rankscope.papers._drawing import FAINT, INK, Style, figure_with_head, plain_axes
from rankscope.papers.dynamics.arms import LONG, OWN, Arm
from rankscope.papers.dynamics.reading import Course, Training, arms_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

STYLES: Mapping[str, Style] = {
    "whole": Style("#000000", "o", "whole"),
    "no MLP": Style("#009E73", "^", "no MLP"),
    "no norm": Style("#56B4E9", "v", "no norm"),
    "no skip": Style("#D55E00", "s", "no skip"),
    "no skip, no norm": Style("#E69F00", "P", "no skip, no norm"),
    "no skip, no MLP": Style("#CC79A7", "D", "no skip, no MLP"),
    "attention alone": Style("#0072B2", "X", "attention alone"),
}
OTHERS = ("#000000", "#D55E00", "#0072B2", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#7f7f7f")
MARKERS = "osX^vDP*"
TICKS = (0, -0.3, -1, -3, -10, -30, -100, -300)
"""Exponents marked on the axis of residuals."""
COLUMNS = ("relative residual, last block", "gradient: Q, K over V, last block", "loss")


def draw_training(run: Run) -> dict[str, Figure]:
    """``figure``: a row for the encoder, one for the causal model, one for fewer blocks and other masks."""
    arms = arms_of(run)
    deepest = int(run.extra["size"]["depth"])
    rows = {
        f"encoder, {deepest} blocks": [a for a in arms if _is_main(a, "encoder", deepest)],
        f"causal, {deepest} blocks": [a for a in arms if _is_main(a, "causal", deepest)],
        "encoder, other": [a for a in arms if a.mask != OWN or a.depth != deepest or a.longer > 1],
    }
    rows = {name: chosen for name, chosen in rows.items() if chosen}
    seeds = Training(run, arms[0]).seeds.size
    figure, panels = figure_with_head(
        len(rows),
        len(COLUMNS),
        "Does training fight collapse?",
        "Sorting 8 symbols; whatever is cut is cut in training too. Residual in exact arithmetic on the weights of the "
        f"moment, mean over sequences. {seeds} " + ("seeds: line the mean, band the range." if seeds > 1 else "seed."),
        panel=(2.5, 1.7),
    )
    for line, (name, chosen) in zip(panels, rows.items(), strict=True):
        for number, arm in enumerate(chosen):
            style = _style(arm, number, deepest)
            training = Training(run, arm)
            _course(line[0], training.residual(), style)
            _course(line[1], training.ratio(), style)
            _course(line[2], training.loss(), style)
        _settle(line, name)
    for axes, title in zip(panels[0], COLUMNS, strict=True):
        axes.set_title(title, size=8.5, color=INK)
    return {"figure": figure}


def _is_main(arm: Arm, family: str, depth: int) -> bool:
    return arm.family == family and arm.mask == OWN and arm.depth == depth and arm.longer == 1


def _style(arm: Arm, number: int, deepest: int) -> Style:
    if _is_main(arm, arm.family, deepest):
        return STYLES[arm.variant]
    where = arm.mask if arm.mask != OWN else f"{arm.depth} blocks" if arm.longer == 1 else f"{arm.longer} x longer"
    dash = {"window(2)": "-"}.get(arm.mask, "--" if arm.depth < deepest else "-")
    return Style(OTHERS[number % len(OTHERS)], MARKERS[number % len(MARKERS)], f"{arm.variant}, {where}", dash)


def _course(axes: Axes, course: Course, style: Style) -> None:
    x = course.steps + 1
    known = np.isfinite(course.values).any(axis=1)
    if not known.any():
        return
    values = course.values[known]
    if values.shape[1] > 1:
        axes.fill_between(
            x[known], np.nanmin(values, axis=1), np.nanmax(values, axis=1), color=style.colour, alpha=0.13, lw=0
        )
    axes.plot(
        x[known], np.nanmean(values, axis=1), color=style.colour, linestyle=style.dash, marker=style.marker,
        markersize=2.8, lw=1.3, label=style.label,
    )  # fmt: skip


def _settle(line: list[Axes], name: str) -> None:
    for axes in line:
        axes.set_xscale("log")
        axes.set_xlabel("step + 1")
        plain_axes(axes)
    low = line[0].get_ylim()[0]
    line[0].set_yscale("symlog", linthresh=1.0)
    line[0].set_ylim(min(low, -1.0) * 1.1, 0.05)
    ticks = [tick for tick in TICKS if tick >= min(low, -1.0) * 1.1]
    line[0].set_yticks(ticks, ["1" if tick == 0 else f"$10^{{{tick:g}}}$" for tick in ticks])
    line[0].minorticks_off()
    line[0].set_ylabel(name, weight="bold")
    line[1].set_yscale("log")
    line[2].set_ylim(0, 2.9)
    line[2].axhline(np.log(10), color=FAINT, lw=0.8, linestyle=":")
    if line[2].get_xlim()[1] < 2 * LONG:
        line[2].legend(
            frameon=False, fontsize=5.8, loc="lower left", labelcolor=INK, handlelength=1.6, labelspacing=0.3
        )
        return
    handles, labels = line[2].get_legend_handles_labels()
    line[2].get_figure(root=True).legend(  # type: ignore[union-attr]
        handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=6.4, labelcolor=INK, handlelength=1.8,
    )  # fmt: skip
