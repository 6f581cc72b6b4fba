"""``report``: runs as one HTML file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope._errors import InputError, ResultError
from rankscope._types import path_of
from rankscope.reporting.page.chapters import chapter_of
from rankscope.reporting.page.overview import run_names, side_by_side
from rankscope.reporting.page.rendering import render
from rankscope.reporting.page.training import training_chapter
from rankscope.reporting.page.wording import visible
from rankscope.runs.gauge_record import Record, holds_record, read_record
from rankscope.runs.run import Run, load_run
from rankscope.runs.storage import write_page

if TYPE_CHECKING:
    from rankscope.reporting.page.parts import Chapter, Section
    from rankscope.runs.comparison import Comparison

LARGEST = 6 * 10**6
Reported = Run | Record
DETAILS = (1, 0)
"""Everything; then only what each metric's main site shows, when everything is too large."""


def report(
    runs: Reported | str | os.PathLike[str] | Sequence[Reported | str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    comparison: Comparison | None = None,
) -> Path:
    """Write one self-contained HTML file about runs of any verb: it opens offline and fetches nothing.

    Args:
        runs: runs, or folders they were saved in; one or several. The record of a gauge, or its folder, is shown too.
        path: the file to write; it is replaced.
        title: of the page; by default the models and verbs.
        comparison: a comparison of two runs, shown first; from :func:`rankscope.compare`.

    Returns:
        The path written.

    Raises:
        InputError: without a run, or when the file would be larger than 6 MB even with the main sites only.
        MissingExtraError: without Jinja2 (extra ``report``).

    Example:
        >>> import rankscope, tempfile
        >>> run = rankscope.measure("init:tiny-bert", sequences=2, tokens=16)
        >>> report(run, tempfile.mkdtemp() + "/report.html").name
        'report.html'
    """
    given: list[Any] = [runs] if isinstance(runs, (str, bytes)) or not isinstance(runs, Iterable) else list(runs)
    if not given:
        raise InputError("There is nothing to report on: give at least one run, or a folder written by --out.")
    read = [_read(run) for run in given]
    folders = [str(run) for run in given if not isinstance(run, (Run, Record))]
    words = ["rankscope", "report", *(folders or ["RUN"]), "-o", Path(path).name]
    page = _fitting(read, title or _title(read), shlex.join(words), comparison)
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_page(target, page)
    except OSError as error:
        raise ResultError(
            f"{target} cannot be written ({error.strerror}). Give -o a file in a folder of yours."
        ) from error
    return target


def _fitting(runs: Sequence[Reported], title: str, command: str, comparison: Comparison | None) -> str:
    """The page with as much detail as stays below the limit."""
    size = 0
    for detail in DETAILS:
        page = _page(runs, title, command, comparison, detail)
        size = len(page.encode("utf-8"))
        if size < LARGEST:
            return page
    raise InputError(
        f"The report of {len(runs)} runs would take {size} bytes, more than the {LARGEST} that one file may have. "
        "Report on fewer runs at a time, or measure with fewer --metrics and --sites."
    )


def _page(runs: Sequence[Reported], title: str, command: str, comparison: Comparison | None, detail: int) -> str:
    chapters: list[Chapter] = [
        training_chapter(run, detail) if isinstance(run, Record) else chapter_of(run, detail) for run in runs
    ]
    shared = side_by_side([run for run in runs if isinstance(run, Run)], detail)
    together: list[Section] = [] if shared is None else [shared]
    if comparison is None:
        return render(title, chapters, together, visible(command))
    from rankscope.reporting.page.differences import comparison_chapter

    first = comparison_chapter(comparison, together, detail)
    return render(title, [first, *chapters], [], visible(command))


def _read(given: Reported | str | os.PathLike[str]) -> Reported:
    if isinstance(given, (Run, Record)):
        return given
    path_of(given, "run", "a run, the record of a gauge, or the folder it was saved in")
    return read_record(given) if holds_record(given) else load_run(given)


def _title(runs: Sequence[Reported]) -> str:
    names = run_names([run for run in runs if isinstance(run, Run)])
    names += [run.name or str(run.facts.get("model")) for run in runs if isinstance(run, Record)]
    return ", ".join(dict.fromkeys(name.rpartition(" (")[0] or name for name in names))
