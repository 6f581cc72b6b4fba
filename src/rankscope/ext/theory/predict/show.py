"""How a ``predict`` run is shown: curves over depth, and the oracles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rankscope.ext.theory.prediction import AGREEMENT
from rankscope.runs.curves import names_in
from rankscope.runs.document import run_document
from rankscope.runs.rows import only
from rankscope.runs.summary import shown_lines
from rankscope.views import (
    BEFORE,
    Column,
    Document,
    Guide,
    Line,
    LineChart,
    Plot,
    Row,
    Style,
    Table,
    number,
)
from rankscope.views.palette import BLACK, BLUE, SERIES

if TYPE_CHECKING:
    from rankscope.runs.run import Run

SAMPLED = "sampled"
DEEPEST_SHOWN = -12.0
DASHES = ("--", "-.", ":")
Floats = NDArray[np.float64]


def document(run: Run) -> Document:
    """The relative residual by block for the sampled curve and each oracle that gives one; then the oracles."""
    design = run.extra["design"]
    title = (
        f"predict: {design['name']}: {design['depth']} blocks, width {design['width']}, {design['heads']} heads, mask "
        f"{design['mask']}, {design['norm_place']}-norm{_further_norms(design)}, mlp {design['mlp']}, skips "
        f"{design['attention_skip']:g} and {design['mlp_skip']:g}"
    )
    return run_document(run, (_table(run), *_oracles(run.extra["oracles"])), title=title)


def _further_norms(design: Mapping[str, Any]) -> str:
    """Norms on branches, queries and keys; runs saved before a design had them lack the keys."""
    branches = " and norms on branches" if design.get("branch_norm") else ""
    return branches + (f", QK-norm of gain {design['qk_norm']:g}" if design.get("qk_norm") else "")


def predicted_curves(run: Run) -> dict[str, Floats]:
    """For each curve its values, ``(sequences, blocks + 1)`` from the first tokens on; nan if there is no value."""
    curves = {}
    for name in names_in(run.table, "curve"):
        rows = only(run.table, curve=name)
        sequences, layers = rows["sequence"].to_numpy(), rows["layer"].to_numpy()
        places = np.where(np.array(rows["site"].to_pylist()) == "block.in", 0, layers + 1)
        grid = np.full((int(sequences.max()) + 1, int(places.max()) + 1), np.nan)
        grid[sequences, places] = rows["value"].to_numpy()
        curves[name] = grid
    return curves


def _table(run: Run) -> Table:
    curves = predicted_curves(run)
    depth = run.extra["design"]["depth"]
    sampled = curves[SAMPLED]
    others = {name: grid for name, grid in curves.items() if name != SAMPLED}
    rows: list[Row] = []
    for place in shown_lines(depth + 1):
        own = sampled[:, place] if place < sampled.shape[1] else np.array([math.nan])
        spread = float(own.std(ddof=1)) if len(own) > 1 else math.nan
        told = [float(grid[0, place]) if place < grid.shape[1] else math.nan for grid in others.values()]
        label = "in" if place == 0 else str(place - 1)
        rows.append([label, *(_digits(value) for value in (float(own.mean()), spread, *told))])
    columns = [
        Column(SAMPLED, trend=sampled.mean(axis=0)[: depth + 1].tolist()),
        Column("spread"),
        *(Column(name, trend=grid[0, : depth + 1].tolist()) for name, grid in others.items()),
    ]
    return Table(["block", *columns], rows, caption="log10 of the relative residual at block.out")


def _oracles(oracles: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each theory says, or which of its assumptions do not hold."""
    words = []
    for oracle in oracles:
        failed = [f"{one['assumption']} (found {_found(one['found'])})" for one in oracle["assumptions"]]
        failed = [word for word, one in zip(failed, oracle["assumptions"], strict=True) if not one["holds"]]
        name, depth = oracle["oracle"].replace("_", " "), oracle.get("agreement_depth")
        if failed:
            words.append(f"{name}: does not apply, needs {', '.join(failed)}")
        else:
            words.append(f"{name}: " + ("tokens do not agree" if depth is None else f"agreement at depth {depth:.1f}"))
    return ["\n".join(words)] if words else []


def _found(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _digits(value: float) -> str:
    if not math.isfinite(value):
        return ""
    return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.3e}"


def plot(run: Run) -> Plot:
    """Log10 of the relative residual by block: a line for each seed and each oracle."""
    settings = f"{run.extra['design']['name']} at initialisation, {run.provenance.sequences} seeds"
    return Plot(run.verdict, settings, (_chart(run),), columns=1, panel_size=(6.4, 3.9))


def _chart(run: Run) -> LineChart:
    curves = predicted_curves(run)
    sampled, depth = curves[SAMPLED], run.extra["design"]["depth"]
    seeds = Style(BLUE, width=1.1)
    lines = [
        Line("" if seed else "sampled, one line per seed", np.arange(BEFORE, row.size - 1), row, style=seeds)
        for seed, row in enumerate(sampled)
    ]
    for order, (name, grid) in enumerate((name, grid) for name, grid in curves.items() if name != SAMPLED):
        style = Style((BLACK, *SERIES[1:5])[order % 5], dash=DASHES[order % len(DASHES)], width=1.6)
        lines.append(Line(name.replace("_", " "), np.arange(BEFORE, grid.shape[1] - 1), grid[0], style=style))
    furthest = float(max(4, depth))
    low = max(DEEPEST_SHOWN, float(np.nanmin(sampled)) - 0.3)
    guides = [Guide(math.log10(AGREEMENT), "tokens agree to $10^{-3}$")]
    return LineChart(
        "log10 of the relative residual",
        tuple(lines),
        guides=tuple(guides),
        x_range=(BEFORE, furthest),
        y_range=(min(low, math.log10(AGREEMENT) - 0.5), 0.15),
    )
