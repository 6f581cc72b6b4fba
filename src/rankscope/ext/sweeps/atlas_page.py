"""``atlas``: a sweep as one HTML page, with small curves of every model, a sortable table and training trajectories."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.errors import InputError, ResultError
from rankscope.ext.sweeps.plan import WHOLE
from rankscope.ext.sweeps.profiles import Profile, profiles_in
from rankscope.ext.sweeps.results import Results
from rankscope.ext.sweeps.status import SweepStatus, status_in
from rankscope.reporting.page.charts import Chart, Views, heat_view, series_of
from rankscope.reporting.page.rendering import Chapter, render
from rankscope.reporting.page.safe_text import clipped, split_verdict, spoken, visible
from rankscope.reporting.states import STATES
from rankscope.runs.curves import Curve
from rankscope.runs.places import write_page
from rankscope.views import UNDEFINED, Cell, Column, Row, Section, Table, number, spans_decades

MOST_PANELS = 400
MOST_ROWS = 2000
MOST_FAILURES = 100
TABLED = ("relative_residual", "mean_cosine", "effective_rank")


def atlas(folder: str | os.PathLike[str], path: str | os.PathLike[str], *, title: str | None = None) -> Path:
    """Write one self-contained HTML file about all models of a sweep that were measured.

    The page has small curves of every model on one scale, a sortable table, and a heatmap of block by step for runs
    with several checkpoints. It shows rows of the verb ``measure``; read those of others with :func:`rankscope.query`.

    Args:
        folder: folder or address of the sweep, which may be incomplete.
        path: the file to write; an existing file is replaced.
        title: title of the page; by default the name of the folder.

    Returns:
        The path written.

    Raises:
        InputError: no task with the verb ``measure`` is done.
        ResultError: there is no sweep in the folder, or the file cannot be written.
        MissingExtraError: without Jinja2 (extra ``report``).
    """
    contents = Results.at(folder).contents()
    profiles = profiles_in(contents)
    if not profiles:
        words = f"No task of the verb measure is done in {contents.results.place}, and the atlas is drawn from these."
        raise InputError(words)
    status = status_in(contents)
    name = contents.results.place.root.rpartition("/")[2]
    models = len({one.model for one in profiles})
    # The last checkpoint of each model and variant stands for it.
    last = list({(one.model, one.variant): one for one in profiles}.values())
    whole = [_state(one) for one in last if one.variant == WHOLE]
    states = [f"{whole.count(words)} {words}" for _, words in STATES.values() if words in whole]
    left = {"failed": status.counts["failed"], "not run yet": status.counts["missing"]}
    missing = ", ".join(f"{count} tasks {words}" for words, count in left.items() if count)
    sections = (
        _profiles_section(last),
        _training_section(profiles),
        _table_section(profiles),
        _failures_section(status),
    )
    chapter = Chapter(
        title=f"sweep · {clipped(name)}",
        question="How does each model behave?",
        state="plain" if status.complete else "care",
        headline=f"{models} model{'s' if models > 1 else ''} side by side",
        verdict=[f"Verdicts of the whole models: {', '.join(states)}."] if states else [],
        tiles=[
            ("models measured", str(models)),
            ("tasks", f"{status.counts['done']} of {sum(status.counts.values())} done"),
            ("rows measured", f"{sum(one.rows or 0 for one in profiles):,}"),
            ("work", f"{sum(one.seconds or 0 for one in profiles):,.0f} s"),
        ],
        sections=[section for section in sections if section is not None],
        notes=[f"The sweep is not complete: {missing}."] if missing else [],
    )
    command = ["rankscope", "sweep", "atlas", str(folder), "--out", Path(path).name]
    page = render(title or name, [chapter], [], visible(shlex.join(command)))
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_page(target, page)
    except OSError as error:
        raise ResultError(f"{target} cannot be written ({error.strerror}). Give --out a file of yours.") from error
    return target


def _profiles_section(last: Sequence[Profile]) -> Section | None:
    """One small panel per model, all on the same scale; the last checkpoint of a training run."""
    lines: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in last:
        for (metric, stack), line in one.curves.items():
            series = lines.setdefault((metric, one.variant), [])
            if len(series) < MOST_PANELS:
                series.append(series_of(f"{one.model} {stack}" if stack else one.model, line))
    if not lines:
        return None
    views: Views = {}
    for (metric, variant), series in lines.items():
        is_log = spans_decades(value for one in series for value in one["y"])
        views[metric, variant] = {"metric": metric, "series": series, "guides": [], "log": is_log, "form": "number"}
    chart = Chart(
        "multiples",
        "Profiles",
        "From the first block on the left to the last on the right, whose number is below; all panels share one "
        "scale. Mean over sequences, heads and seeds; the band runs from the 10% to the 90% quantile. Hollow points "
        "lie at the float floor.",
        ("metric", "variant"),
        views,
    )
    return Section("Every model", "How the tokens change with depth in each model.", (chart,))


def _training_section(profiles: Sequence[Profile]) -> Section | None:
    """Heatmaps of block by step, for each run with several checkpoints whose step is known."""
    runs: dict[tuple[str, str], dict[int, Profile]] = {}
    for one in profiles:
        if one.step is not None:
            runs.setdefault((one.model, one.variant), {})[one.step] = one
    views: Views = {}
    for (model, variant), by_step in runs.items():
        steps = sorted(by_step)
        if len(steps) < 2:
            continue
        for metric, stack in by_step[steps[-1]].curves:
            lines = [by_step[step].curves.get((metric, stack)) for step in steps]
            layers = sorted({int(layer) for line in lines if line is not None for layer in line.layers})
            values = np.full((len(layers), len(steps)), np.nan)
            for column, line in enumerate(lines):
                if line is not None:
                    values[np.searchsorted(layers, line.layers), column] = line.mean
            name = " ".join(part for part in (model, stack, "" if variant == WHOLE else f"({variant})") if part)
            views[metric, name] = heat_view(metric, steps, layers, values, ("block", "step"))
    if not views:
        return None
    chart = Chart(
        "heat",
        "Block by step",
        "Checkpoints to the right in the order of training, blocks downwards; mean over sequences, heads and seeds.",
        ("metric", "run"),
        views,
    )
    return Section("Over training", "How the profile changes during training.", (chart,))


def _table_section(profiles: Sequence[Profile]) -> Section:
    """One row per model, checkpoint and variant; click the head to sort."""
    names = [name for name in TABLED if any(name == metric for one in profiles for metric, _ in one.curves)]
    columns = [Column("model"), *(Column(name, width="narrow") for name in ("checkpoint", "variant", "verdict"))]
    columns += [Column("parameters"), Column("blocks")]
    for name in names:
        columns += [Column(f"{spoken(name)}, first", term=name), Column(f"{spoken(name)}, last")]
    rows: list[Row] = []
    for one in profiles[:MOST_ROWS]:
        depth = max((line.layers.size for line in one.curves.values()), default=0)
        cells: list[str | Cell] = [
            Cell(clipped(one.model, 40)),
            Cell(clipped(one.checkpoint or "", 40), order=None if one.step is None else float(one.step)),
            Cell(clipped(one.variant, 24)),
            Cell(_state(one)),
            Cell("") if one.parameters is None else Cell(f"{one.parameters:,}", order=float(one.parameters)),
            Cell(str(depth), order=float(depth)),
        ]
        for name in names:
            line = next((line for (metric, _), line in one.curves.items() if metric == name), None)
            cells += [Cell(""), Cell("")] if line is None else [_end(line, 0), _end(line, -1)]
        rows.append(cells)
    caption = "First and last block, means over sequences and seeds; of an encoder-decoder the encoder; * float floor"
    table = Table(columns, rows, caption, sortable=True, left_out=max(0, len(profiles) - MOST_ROWS))
    return Section("All in one table", "Press an arrow to sort by its column, again to reverse the order.", (table,))


def _end(line: Curve, position: int) -> Cell:
    value, at_floor = float(line.mean[position]), bool(line.any_floor[position])
    if not np.isfinite(value):
        return Cell(UNDEFINED)
    return Cell(number(value), ("floor",) if at_floor else (), order=value)


def _state(one: Profile) -> str:
    """The verdict in two words if it has a code, otherwise its beginning."""
    if one.code is not None and one.code in STATES:
        return STATES[one.code][1]
    return clipped(split_verdict(visible(one.verdict or ""))[0], 32)


def _failures_section(status: SweepStatus) -> Section | None:
    """The failed tasks, with reasons."""
    if not status.failures:
        return None
    rows: list[Row] = [
        [Cell(clipped(one.what, 120)), Cell(clipped(one.reason, 400))] for one in status.failures[:MOST_FAILURES]
    ]
    left = max(0, len(status.failures) - MOST_FAILURES)
    table = Table(["task", Column("reason", width="wide")], rows, "Tasks without rows", left_out=left)
    return Section("What failed", "", (table,))
