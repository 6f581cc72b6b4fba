"""A finished run on its way to the user: saved, printed as JSON, as one sentence, or as a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rankscope.cli.streams import print_json, remarks_console, results_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.results.conditions import Condition
    from rankscope.results.run import Run


def wants_progress(*, quiet: bool, no_progress: bool) -> bool:
    """Whether a progress bar is of use to anyone."""
    return not (quiet or no_progress) and sys.stderr.isatty()


def show_run(run: Run, *, as_json: bool, quiet: bool, out: Path | None) -> None:
    """Save the run if asked, then print it; remarks go to stderr."""
    remarks = remarks_console()
    if out is not None:
        run.save(out)
    if as_json:
        print_json(run.to_json())
        if not quiet:
            for note in run.notes:
                remarks.print(f"note: {note}", markup=False)
    elif quiet:
        typer.echo(run.verdict)
    else:
        from rankscope.reporting.terminal import print_run

        print_run(run, results_console())
    if out is not None and not quiet:
        remarks.print(f"saved in {out}", markup=False)


def fail_where(run: Run, conditions: Sequence[Condition]) -> None:
    """Leave with 1 if a condition holds, after saying where on stderr.

    Raises:
        InputError: when a condition cannot be judged, because nothing it reads was measured or is defined.
    """
    held = [words for condition in conditions if (words := condition.held_in(run.table)) is not None]
    for words in held:
        remarks_console().print(f"failed: {words}", markup=False)
    if held:
        raise typer.Exit(1)
