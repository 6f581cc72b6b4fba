"""``atlas``: a sweep as one HTML page."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from rankscope._errors import InputError, ResultError
from rankscope._types import path_of
from rankscope.reporting.page.parts import Chapter
from rankscope.reporting.page.profiles import (
    failures_section,
    multiples_section,
    states_of,
    table_section,
    trajectory_section,
)
from rankscope.reporting.page.rendering import render
from rankscope.reporting.page.wording import clipped, visible
from rankscope.runs.storage import write_page
from rankscope.runs.sweep_folder import SweepFolder
from rankscope.runs.sweep_profiles import profiles_in
from rankscope.runs.sweep_status import SweepStatus, status_of


def atlas(folder: str | os.PathLike[str], path: str | os.PathLike[str], *, title: str | None = None) -> Path:
    """Write one self-contained HTML file about all models of a sweep that were measured.

    Small curves of every model on one scale, a table that sorts, and where a run has several checkpoints a map of
    block by step. Rows come from the verb ``measure``; those of other verbs are read with :func:`rankscope.query`.

    Args:
        folder: of the sweep; it need not be complete.
        path: the file to write; it is replaced.
        title: of the page; by default the name of the folder.

    Returns:
        The path written.

    Raises:
        InputError: when no task with the verb ``measure`` is done.
        ResultError: when there is no sweep in the folder, or the file cannot be written.
        MissingExtraError: without Jinja2 (extra ``report``).
    """
    home = SweepFolder(path_of(folder, "folder", "the folder of a sweep"))
    profiles = list(profiles_in(home, home.expected()))
    if not profiles:
        raise InputError(f"No task of the verb measure is done in {home.home}, and the atlas is drawn from these.")
    status = status_of(home.home)
    sections = (
        multiples_section(profiles),
        trajectory_section(profiles),
        table_section(profiles),
        failures_section(status),
    )
    models = len({one.model for one in profiles})
    states = ", ".join(f"{count} {words}" for words, count in states_of(profiles).items())
    chapter = Chapter(
        title=f"sweep · {clipped(home.home.resolve().name)}",
        question="How does each model behave?",
        state="plain" if status.complete else "care",
        headline=f"{models} model{'s' if models > 1 else ''} side by side",
        verdict=[f"Verdicts of the whole models: {states}."] if states else [],
        tiles=_tiles(status, models),
        sections=[section for section in sections if section is not None],
        notes=[] if status.complete else [f"The sweep is not complete: {_left(status)}."],
    )
    words = ["rankscope", "sweep", "atlas", str(folder), "--out", Path(path).name]
    page = render(title or home.home.resolve().name, [chapter], [], visible(shlex.join(words)))
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
