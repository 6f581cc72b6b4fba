"""How an ``ablate`` run is shown: a table of variants by depth, for each mask and kind of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rankscope.errors import InputError
from rankscope.runs.document import facts_line, run_document
from rankscope.runs.similarity import shown_positions
from rankscope.verbs.ablate.judge import MEASURE, AblationArm, arms
from rankscope.verbs.measure.show import floor_guides
from rankscope.views import Column, Document, Line, LineChart, Plot, Row, Style, Table, measured
from rankscope.views.palette import BLACK, BLUE, GREEN, GREY, PURPLE, SKY, VERMILION, WINE

if TYPE_CHECKING:
    from rankscope.runs.run import Run

MOST_LAYERS = 8
STYLES = {
    "pure": Style(BLACK, "o"),
    "+norm": Style(VERMILION, "s"),
    "+mlp": Style(PURPLE, "D"),
    "+norm+mlp": Style(WINE, "P"),
    "+skip": Style(BLUE, "^"),
    "+norm+skip": Style(SKY, "v"),
    "full": Style(GREEN, "X"),
}
OTHER = Style(GREY, ".", ":")
Setting = tuple[str, str, str | None]
"""Weights, mask and stack."""


def document(run: Run) -> Document:
    """A table of variants by block for each mask and kind of weights."""
    return run_document(run, tuple(_table(*item) for item in _by_setting(run, MEASURE, "block.out").items()))


def _by_setting(run: Run, metric: str, site: str) -> dict[Setting, list[AblationArm]]:
    grid: dict[Setting, list[AblationArm]] = {}
    for arm in arms(run.table, metric, site):
        grid.setdefault((arm.weights, arm.mask, arm.stack), []).append(arm)
    return grid


def _words(setting: Setting) -> str:
    weights, mask, stack = setting
    return ", ".join(part for part in (stack, f"{weights} weights", f"{mask} mask") if part)


def _table(setting: Setting, members: list[AblationArm]) -> Table:
    chosen = shown_positions(members[0].line.layers.size, MOST_LAYERS)
    ends = (0, len(chosen) - 1)
    blocks = [
        Column(f"block {members[0].line.layers[place]}", spare=0 if number in ends else 1 + number % 2)
        for number, place in enumerate(chosen)
    ]
    rows: list[Row] = [
        [
            arm.variant,
            *(measured(float(arm.line.mean[place]), floor=bool(arm.line.any_floor[place])) for place in chosen),
        ]
        for arm in members
    ]
    trends = [arm.line.mean.tolist() for arm in members]
    return Table(
        [Column("variant", align="left"), *blocks],
        rows,
        caption=f"{MEASURE} at block.out ({_words(setting)})",
        row_trends=trends,
    )


def plot(run: Run, *, metrics: Sequence[str] | None = None, site: str | None = None) -> Plot:
    """The first of ``metrics`` over depth for every network, one panel per mask and kind of weights.

    Raises:
        InputError: for a metric or site that the run does not contain.
    """
    metric, site = (metrics or (MEASURE,))[0], site or "block.out"
    settings = _by_setting(run, metric, site)
    if not settings:
        raise InputError(f"This ablation has no {metric} at {site}.")
    columns = min(len(settings), 2 if len(settings) in (2, 4) else 3)
    panels = [
        _chart(run, setting, members, metric if place % columns == 0 else "")
        for place, (setting, members) in enumerate(settings.items())
    ]
    size = (4.6 if len(panels) > 1 else 6.4, 3.3)
    return Plot(run.verdict, facts_line(run), tuple(panels), columns=columns, panel_size=size)


def _chart(run: Run, setting: Setting, members: list[AblationArm], y_label: str) -> LineChart:
    guides = floor_guides(run)
    # A logarithmic axis has no zero: draw it inside the zone of the floor.
    bottom = guides[0].value / 10 if guides else float(np.finfo(float).tiny)
    lines = []
    for order, arm in enumerate(members):
        known = np.isfinite(arm.line.mean)
        y, low, high = (np.maximum(part, bottom)[known] for part in (arm.line.mean, arm.line.low, arm.line.high))
        look = STYLES.get(arm.variant, OTHER)
        # Each line is thinner than the one below it, so that coinciding lines are all visible.
        style = Style(look.colour, look.marker, look.dash, max(1.2, 3.6 - 0.45 * order))
        lines.append(Line(arm.variant, arm.line.layers[known], y, low, high, arm.line.any_floor[known], style))
    highest = np.concatenate([arm.line.high[np.isfinite(arm.line.high)] for arm in members])
    top = 1.3 * max(1.0, float(highest.max(initial=0.0)))
    return LineChart(
        _words(setting), tuple(lines), guides=guides, y_label=y_label.replace("_", " "), log=True, y_range=(None, top)
    )
