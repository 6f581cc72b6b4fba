"""``report``: runs as one HTML file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope._types import path_of
from rankscope.errors import InputError, ResultError
from rankscope.monitor.block_log import read_block_log
from rankscope.monitor.record import Record, holds_record, read_record
from rankscope.reporting.page.chapters import chapter_of, is_plain, model_name
from rankscope.reporting.page.charts import Chart, Views, line_view, metrics_in_order, sites_in_order
from rankscope.reporting.page.doctor_chapter import doctor_chapter
from rankscope.reporting.page.gauge_chapter import training_chapter
from rankscope.reporting.page.rendering import Chapter, render
from rankscope.reporting.page.safe_text import visible
from rankscope.runs.curves import Curve
from rankscope.runs.places import write_page
from rankscope.runs.presenting import showing
from rankscope.runs.provenance import current_command
from rankscope.runs.run import Run, load_run
from rankscope.verbs.doctor.checks import DoctorReport
from rankscope.verbs.measure.show import lines_by_stack
from rankscope.views import Section

if TYPE_CHECKING:
    from rankscope.runs.comparison import Comparison

Reported = Run | Record | DoctorReport


def report(
    runs: Reported | str | os.PathLike[str] | Sequence[Reported | str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    comparison: Comparison | None = None,
) -> Path:
    """Write one self-contained HTML file about runs of any verb: it opens offline and fetches nothing.

    Args:
        runs: one or several runs, or the folders they were saved in; also records of a gauge, or their folders, files
            of block statistics (``.jsonl``, one flush a line), and what :func:`rankscope.doctor` returns.
        path: the file to write; an existing file is replaced.
        title: title of the page; by default the models and verbs.
        comparison: a comparison of two runs, shown first; from :func:`rankscope.compare`.

    Returns:
        The path written.

    Raises:
        InputError: no run was given.
        MissingExtraError: without Jinja2 (extra ``report``).

    Example:
        >>> import rankscope, tempfile
        >>> run = rankscope.measure("init:tiny-bert", rankscope.Inputs(sequences=2, tokens=16))
        >>> report(run, tempfile.mkdtemp() + "/report.html").name
        'report.html'
    """
    given: list[Any] = [runs] if isinstance(runs, (str, bytes)) or not isinstance(runs, Iterable) else list(runs)
    if not given:
        raise InputError("There is nothing to report on: give at least one run, or a folder written by --out.")
    read = [one for run in given for one in _read(run)]
    folders = [str(run) for run in given if not isinstance(run, (Run, Record, DoctorReport))]
    words = ["rankscope", "report", *(folders or ["RUN"]), "-o", Path(path).name]
    command = shlex.join(words)
    if isinstance(read[0], DoctorReport):
        # Asked for on the command line, the whole command; a module in memory has none.
        asked = current_command()
        is_asked = asked[:2] == ("rankscope", "doctor")
        command = shlex.join(asked) if is_asked else f"rs.report(rs.doctor(model, inputs), {Path(path).name!r})"
    with showing(*(run for run in read if isinstance(run, Run))):
        page = _page(read, title or _title(read), command, comparison)
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_page(target, page)
    except OSError as error:
        raise ResultError(
            f"{target} cannot be written ({error.strerror}). Give -o a file in a folder of yours."
        ) from error
    return target


def _page(runs: Sequence[Reported], title: str, command: str, comparison: Comparison | None) -> str:
    chapters = [_chapter(run) for run in runs]
    shared = side_by_side([run for run in runs if isinstance(run, Run)])
    together: list[Section] = [] if shared is None else [shared]
    if comparison is None:
        return render(title, chapters, together, visible(command))
    from rankscope.reporting.page.compare_chapter import comparison_chapter

    first = comparison_chapter(comparison, together)
    return render(title, [first, *chapters], [], visible(command))


def _chapter(run: Reported) -> Chapter:
    if isinstance(run, DoctorReport):
        return doctor_chapter(run)
    return training_chapter(run) if isinstance(run, Record) else chapter_of(run)


def _read(given: Reported | str | os.PathLike[str]) -> tuple[Reported, ...]:
    if isinstance(given, (Run, Record, DoctorReport)):
        return (given,)
    path_of(given, "run", "a run, the record of a gauge, or the folder it was saved in")
    if os.fspath(given).endswith(".jsonl"):
        return read_block_log(given)
    return (read_record(given) if holds_record(given) else load_run(given),)


def _title(runs: Sequence[Reported]) -> str:
    names = [model_name(run) for run in runs if isinstance(run, Run)]
    names += [run.name or str(run.facts.get("model")) for run in runs if isinstance(run, Record)]
    names += [run.model for run in runs if isinstance(run, DoctorReport)]
    return ", ".join(dict.fromkeys(names))


MOST_RUNS = 12


def side_by_side(runs: Sequence[Run]) -> Section | None:
    """A metric over depth for every run that has it; None if no two runs share one."""
    plain = [run for run in runs if is_plain(run) and run.table.num_rows][:MOST_RUNS]
    if len(plain) < 2:
        return None
    names = run_names(plain)
    views: Views = {}
    for metric in dict.fromkeys(name for run in plain for name in metrics_in_order(run.table)):
        sites = dict.fromkeys(site for run in plain for site in sites_in_order(run.table, metric))
        for site in sites:
            lines = _lines_by_run(plain, names, metric, site)
            if len({name for name, _ in lines}) > 1:
                views[metric, site] = line_view(metric, lines)
    if not views:
        return None
    chart = Chart("lines", "The same metric in each run", "Mean over sequences; the band is 10% to 90%.",
                  ("metric", "site"), views)  # fmt: skip
    return Section("Side by side", "", (chart,))


def run_names(runs: Sequence[Run]) -> list[str]:
    """A short name for each run, numbered if two would be the same."""
    names = [model_name(run) for run in runs]
    return [f"{name} ({position + 1})" if names.count(name) > 1 else name for position, name in enumerate(names)]


def _lines_by_run(runs: Sequence[Run], names: Sequence[str], metric: str, site: str) -> list[tuple[str, Curve]]:
    lines_by_run = []
    for run, name in zip(runs, names, strict=True):
        if metric in metrics_in_order(run.table):
            lines = lines_by_stack(run.table, metric, site)
            lines_by_run += [(f"{name} {stack}".strip(), line) for stack, line in lines]
    return lines_by_run
