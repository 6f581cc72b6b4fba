"""``atlas``: a sweep as one HTML page, with small curves of every model, a sortable table and training trajectories."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.errors import InputError, ResultError
from rankscope.ext.sweeps.profiles import Profile, profiles_in
from rankscope.ext.sweeps.results import Results
from rankscope.ext.sweeps.status import SweepStatus, status_in
from rankscope.reporting.page.charts import Chart, Views, plain, series_of
from rankscope.reporting.page.facts import FACTS
from rankscope.reporting.page.rendering import Chapter, render
from rankscope.reporting.page.safe_text import clipped, split_verdict, spoken, visible
from rankscope.reporting.states import STATES
from rankscope.runs.curves import Curve
from rankscope.runs.storage import write_page
from rankscope.views import UNDEFINED, Cell, Column, Row, Section, Table, number, spans_decades


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
    place = contents.results.place
    profiles = list(profiles_in(contents))
    if not profiles:
        raise InputError(f"No task of the verb measure is done in {place}, and the atlas is drawn from these.")
    status = status_in(contents)
    name = place.root.rpartition("/")[2]
    sections = (
        multiples_section(profiles),
        trajectory_section(profiles),
        table_section(profiles),
        failures_section(status),
    )
    models = len({one.model for one in profiles})
    states = ", ".join(f"{count} {words}" for words, count in states_of(profiles).items())
    chapter = Chapter(
        title=f"sweep · {clipped(name)}",
        question="How does each model behave?",
        state="plain" if status.complete else "care",
        headline=f"{models} model{'s' if models > 1 else ''} side by side",
        verdict=[f"Verdicts of the whole models: {states}."] if states else [],
        tiles=_tiles(status, models),
        sections=[section for section in sections if section is not None],
        notes=[] if status.complete else [f"The sweep is not complete: {_left(status)}."],
    )
    words = ["rankscope", "sweep", "atlas", str(folder), "--out", Path(path).name]
    page = render(title or name, [chapter], [], visible(shlex.join(words)))
    return _written(Path(path), page)


def _tiles(status: SweepStatus, models: int) -> list[tuple[str, str]]:
    total = sum(status.counts.values())
    return [
        ("models measured", str(models)),
        ("tasks", f"{status.counts['done']} of {total} done"),
        ("rows", f"{status.rows:,}"),
        ("work", f"{status.seconds:,.0f} s"),
    ]


def _left(status: SweepStatus) -> str:
    counts = {"failed": status.counts["failed"], "not run yet": status.counts["missing"]}
    return ", ".join(f"{count} tasks {words}" for words, count in counts.items() if count)


def _written(target: Path, page: str) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_page(target, page)
    except OSError as error:
        raise ResultError(f"{target} cannot be written ({error.strerror}). Give --out a file of yours.") from error
    return target


WHOLE = "full"
MOST_PANELS = 400
MOST_ROWS = 2000
MOST_FAILURES = 100
TABLED = ("relative_residual", "mean_cosine", "effective_rank")


def multiples_section(profiles: Sequence[Profile]) -> Section | None:
    """One small panel per model, all on the same scale; the last checkpoint of a training run."""
    views: Views = {}
    last = _last_moments(profiles)
    for metric in _metrics(last):
        for variant in dict.fromkeys(one.variant for one in last):
            lines = [
                (f"{one.model} {stack}" if stack else one.model, line)
                for one in last
                if one.variant == variant
                for (name, stack), line in one.curves.items()
                if name == metric
            ]
            series = [series_of(name, line) for name, line in lines[:MOST_PANELS]]
            if series:
                drawn = (value for one in series for value in one["y"])
                views[metric, variant] = {
                    "metric": metric,
                    "series": series,
                    "guides": [],
                    "log": spans_decades(drawn),
                    "form": "number",
                }
    if not views:
        return None
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


def table_section(profiles: Sequence[Profile]) -> Section | None:
    """One row per model, checkpoint and variant; click the head to sort."""
    if not profiles:
        return None
    names = [name for name in TABLED if any(name == metric for one in profiles for metric, _ in one.curves)]
    columns = [Column("model"), *(Column(name, width="narrow") for name in ("checkpoint", "variant", "verdict"))]
    columns += [Column("parameters"), Column("blocks")]
    for name in names:
        columns += [Column(f"{spoken(name)}, first", term=name), Column(f"{spoken(name)}, last")]
    rows = [_model_row(one, names) for one in profiles[:MOST_ROWS]]
    caption = "First and last block, means over sequences and seeds; of an encoder-decoder the encoder; * float floor"
    table = Table(columns, rows, caption, sortable=True, left_out=max(0, len(profiles) - MOST_ROWS))
    return Section("All in one table", "Press an arrow to sort by its column, again to reverse the order.", (table,))


def _model_row(one: Profile, names: Sequence[str]) -> list[str | Cell]:
    parameters = (one.facts.get("provenance") or {}).get("parameters")
    depth = max((line.layers.size for line in one.curves.values()), default=0)
    cells: list[str | Cell] = [
        Cell(clipped(one.model, 40)),
        Cell(clipped(one.checkpoint or "", 40), order=None if one.step is None else float(one.step)),
        Cell(clipped(one.variant, 24)),
        Cell(_state(one)),
        Cell(f"{parameters:,}", order=float(parameters)) if isinstance(parameters, int) else Cell(""),
        Cell(str(depth), order=float(depth)),
    ]
    for name in names:
        line = _first(one, name)
        ends = [] if line is None or not line.mean.size else [_end(line, 0), _end(line, -1)]
        cells += ends or [Cell(""), Cell("")]
    return cells


def _end(line: Curve, position: int) -> Cell:
    value, at_floor = float(line.mean[position]), bool(line.any_floor[position])
    if not np.isfinite(value):
        return Cell(UNDEFINED)
    return Cell(number(value), ("floor",) if at_floor else (), order=value)


def _state(one: Profile) -> str:
    """The verdict in two words if it has a code, otherwise its beginning."""
    codes = {str(item.get("code")) for item in one.facts.get("evidence") or () if isinstance(item, Mapping)}
    codes = {str(one.facts["code"])} if one.facts.get("code") else codes
    known = [words for code, (_, words) in STATES.items() if code in codes]
    return known[-1] if known else clipped(split_verdict(visible(one.facts.get("verdict", "")))[0], 32)


def _first(one: Profile, metric: str) -> Curve | None:
    return next((line for (name, _), line in one.curves.items() if name == metric), None)


def trajectory_section(profiles: Sequence[Profile]) -> Section | None:
    """Heatmaps of block by step, for each run with several checkpoints whose step is known."""
    runs: dict[tuple[str, str], list[Profile]] = {}
    for one in profiles:
        if one.step is not None:
            runs.setdefault((one.model, one.variant), []).append(one)
    views: Views = {}
    for (model, variant), group in runs.items():
        moments = sorted({one.step: one for one in group}.values(), key=lambda one: one.step or 0)
        if len(moments) < 2:
            continue
        for metric, stack in moments[-1].curves:
            name = " ".join(part for part in (model, stack, "" if variant == WHOLE else f"({variant})") if part)
            views[metric, name] = _map(metric, stack, moments)
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


def _map(metric: str, stack: str | None, moments: Sequence[Profile]) -> dict[str, Any]:
    lines = [one.curves.get((metric, stack)) for one in moments]
    layers = sorted({int(layer) for line in lines if line is not None for layer in line.layers})
    values = np.full((len(layers), len(moments)), np.nan)
    for column, line in enumerate(lines):
        if line is not None:
            values[np.searchsorted(layers, line.layers), column] = line.mean
    fact = FACTS.metrics.get(metric)
    return {
        "metric": metric,
        "columns": [one.step for one in moments],
        "rows": layers,
        "values": [[plain(float(value)) for value in row] for row in values],
        "names": ["block", "step"],
        "collapse": None if fact is None else fact.at_collapse,
        "log": spans_decades(plain(float(value)) for value in values.ravel()),
    }


def failures_section(status: SweepStatus) -> Section | None:
    """The failed tasks, with reasons."""
    if not status.failures:
        return None
    rows: list[Row] = [
        [Cell(clipped(one.what, 120)), Cell(clipped(one.reason, 400))] for one in status.failures[:MOST_FAILURES]
    ]
    left = max(0, len(status.failures) - MOST_FAILURES)
    table = Table(["task", Column("reason", width="wide")], rows, "Tasks without rows", left_out=left)
    return Section("What failed", "", (table,))


def states_of(profiles: Sequence[Profile]) -> dict[str, int]:
    """Number of whole models in each state of the verdict, gravest last."""
    states = [_state(one) for one in _last_moments(profiles) if one.variant == WHOLE]
    return {words: states.count(words) for _, words in STATES.values() if words in states}


def _last_moments(profiles: Sequence[Profile]) -> list[Profile]:
    """The last checkpoint of each model and variant."""
    return list({(one.model, one.variant): one for one in profiles}.values())


def _metrics(profiles: Sequence[Profile]) -> list[str]:
    return list(dict.fromkeys(metric for one in profiles for metric, _ in one.curves))
