"""The figure again: ours with its spread, the print on top of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rankscope.papers._drawing import (
    INK,
    Style,
    draw_floor,
    draw_line,
    draw_printed,
    figure_with_head,
    legend_below,
    settle_axes,
)
from rankscope.papers._lines import has_line, line
from rankscope.papers._published import published, published_line
from rankscope.papers.dong2021.comparing import BASE_DEPTH, CURVES, METRIC
from rankscope.runs.curves import names_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

STYLES: Mapping[str, Style] = {
    "SAN": Style("#000000", "o", "SAN"),
    "SAN+MLP": Style("#D55E00", "s", "SAN+MLP"),
    "SAN+skip": Style("#0072B2", "^", "SAN+skip"),
    "transformer": Style("#009E73", "D", "transformer"),
}
MODELS = ("BERT", "ALBERT", "XLNet")
TEXTS = {"BERT": "words", "ALBERT": "pieces", "XLNet": "pieces"}
LEAST = 1e-9
ASIDE = {"SAN": -0.14, "SAN+MLP": 0.14, "SAN+skip": -0.14, "transformer": 0.14}
FAMILY = {"minilm": "BERT", "reaction-bert": "BERT", "antiberty": "BERT", "reaction-albert": "ALBERT"}
TITLES = {
    "minilm": "MiniLM (BERT, 6 blocks, English)",
    "reaction-bert": "rxnfp (BERT, 12 blocks, reactions)",
    "antiberty": "AntiBERTy (BERT, 8 blocks, antibodies)",
    "reaction-albert": "RXNMapper (ALBERT, 12 calls, reactions)",
}


def draw_figure(run: Run) -> dict[str, Figure]:
    """``figure``: random initialisation, both readings. ``figure-trained``: trained weights, where there are any."""
    drawn = {"figure": _initialised(run)}
    trained = [name for name in names_in(run.table, "model") if has_line(run.table, model=name, weights="trained")]
    if trained:
        drawn["figure-trained"] = _trained(run, trained)
    return drawn


def _initialised(run: Run) -> Figure:
    figure, grid = figure_with_head(
        3,
        3,
        "Residual over depth at random initialisation",
        "Lines: ours, mean over initialisations and sequences; band of one standard deviation, on log scales "
        "from the 10% "
        "to the 90% quantile. Hollow marks: Dong et al. 2021, figure 2. Values of exactly zero (tokens equal "
        "bit for bit) "
        "lie on the lower edge.",
    )
    for column, model in enumerate(MODELS):
        for row, (reading, log) in enumerate((("authors", False), ("authors", True), ("theorem", True))):
            axes = grid[row][column]
            _panel(axes, run, model, "init", reading, TEXTS[model], log=log, printed=model)
            if row == 0:
                axes.set_title(f"{model}", size=10, color=INK, weight="bold")
            if column == 0:
                label = {0: "as the authors ran it", 1: "the same, log scale", 2: "as the theorem means it"}[row]
                axes.set_ylabel(f"{label}\nrelative residual (1,∞)", size=8.5)
            if row == 2:
                axes.set_xlabel("block")
    legend_below(figure, list(STYLES.values()), printed="printed mean")
    return figure


def _trained(run: Run, names: list[str]) -> Figure:
    columns = 2 if len(names) > 1 else 1
    rows = -(-len(names) // columns)
    figure, grid = figure_with_head(
        rows,
        columns,
        "Residual over depth in trained models, cut as the authors cut",
        "Lines: ours on these models. Hollow marks: the print for bert-base-cased or albert-base-v2, for orientation.",
    )
    for position, name in enumerate(names):
        axes = grid[position // columns][position % columns]
        _panel(axes, run, name, "trained", "authors", "tokenizer", log=True, printed=FAMILY.get(name, name))
        axes.set_title(TITLES.get(name, name), size=9.5, color=INK)
        axes.set_ylabel("relative residual (1,∞)" if position % columns == 0 else "", size=8.5)
        axes.set_xlabel("block")
    for spare in range(len(names), rows * columns):
        grid[spare // columns][spare % columns].set_visible(False)
    legend_below(figure, list(STYLES.values()), printed="printed, other checkpoint")
    return figure


def _panel(axes: Axes, run: Run, model: str, weights: str, reading: str, text: str, *, log: bool, printed: str) -> None:
    facts = published("dong2021_fig2")
    deepest = 0
    for curve in CURVES:
        where = {"model": model, "weights": weights, "curve": curve, "text": text}
        # The whole model is the same network in both readings.
        where["reading"] = "authors" if curve == "transformer" else reading
        if not has_line(run.table, **where):
            continue
        ours = line(run.table, METRIC, **where)
        deepest = max(deepest, int(ours.depth[-1]))
        band = (ours.low, ours.high) if log else (ours.mean - ours.spread, ours.mean + ours.spread)
        draw_line(axes, ours.depth, ours.mean, band, STYLES[curve], least=LEAST if log else None)
        if reading == "authors" and printed in MODELS and (weights == "trained" or ours.depth[-1] == BASE_DEPTH):
            theirs = published_line(facts, model=printed, weights=weights, curve=curve).values
            draw_printed(axes, theirs, STYLES[curve], aside=ASIDE[curve])
    if log:
        axes.set_yscale("log")
        axes.set_ylim(LEAST, 3.0)
        draw_floor(axes, float(run.floor["relative"]), str(run.floor["dtype"]))
    else:
        axes.set_ylim(-0.02, 1.08)
    settle_axes(axes, deepest)
