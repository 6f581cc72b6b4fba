"""Output of a finished run: saved, and printed as JSON, as one sentence, or as a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rankscope.cli.streams import echo, print_json, remarks_console, results_console
from rankscope.errors import InputError, ResultError
from rankscope.verbs._spec import Answer, Verb

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

    from rankscope.runs.conditions import Condition
    from rankscope.runs.run import Run

FIGURE_DOTS = 200


def wants_progress(*, quiet: bool, no_progress: bool) -> bool:
    """Whether to show a progress bar: only on a terminal."""
    return not (quiet or no_progress) and sys.stderr.isatty()


def show_run(run: Run, *, as_json: bool, quiet: bool, out: str | None, figure: Path | None = None) -> None:
    """Save, print and plot a run; the result is printed even if saving or plotting fails."""
    remarks = remarks_console()
    unsaved = None if out is None else _saved(run, out)
    if as_json:
        print_json(run.to_json())
        if not quiet:
            for note in run.notes:
                remarks.print(f"note: {note}", markup=False)
    elif quiet:
        echo(run.verdict)
    else:
        from rankscope.reporting.terminal import print_run

        print_run(run, results_console())
    if unsaved is not None:
        raise unsaved
    if out is not None and not quiet:
        remarks.print(f"saved in {out}", markup=False)
    if figure is not None:
        save_figure(run.plot(), figure)


def show_why(given: object, *, as_json: bool) -> bool:
    """If ``given`` is the folder of a record, print why its run went bad; exit with code 1 if it did.

    Returns:
        Whether it is one.
    """
    from rankscope.monitor.record import holds_record, read_record
    from rankscope.monitor.why import why

    if not isinstance(given, str | Path) or not holds_record(given):
        return False
    answer = why(read_record(given))
    if as_json:
        print_json(answer.to_json())
    else:
        results_console().print(str(answer), markup=False, highlight=False)
    if answer.since is not None:
        raise typer.Exit(1)
    return True


def show_answer(verb: Verb, answer: Answer, outputs: Mapping[str, Any]) -> None:
    """Print and plot the result of a verb that makes no run; exit with code 1 if it did not pass.

    Args:
        verb: the declaration.
        answer: the result.
        outputs: values of the output options of the verb.
    """
    if outputs.get("figure") is not None:
        from rankscope.views.figures import draw

        plot = verb.show().plot
        assert plot is not None, "a verb without a figure has no --figure"
        save_figure(draw(plot(answer), f"The figure of {verb.name}"), outputs["figure"])
    if outputs.get("page") is not None:
        from rankscope.reporting.pages import report

        written = report(answer, outputs["page"])  # type: ignore[arg-type]
        remarks_console().print(f"wrote {written}", markup=False)
    if outputs["as_json"]:
        print_json(answer.to_json())
    elif not outputs["quiet"]:
        from rankscope.views.terminal import print_document

        tone = "good" if answer.passed else "bad"
        print_document(verb.show().document(answer), results_console(), tone=tone)
    elif answer.brief:
        echo(answer.brief)
    if not answer.passed:
        raise typer.Exit(1)


def _saved(run: Run, out: str) -> ResultError | None:
    """Save a run; returns the error if that fails, to be raised after printing."""
    try:
        run.save(out)
    except ResultError as error:
        return error
    return None


def save_figure(drawn: Figure, place: Path) -> None:
    """Write a figure in the format given by the file name.

    Raises:
        InputError: a format matplotlib does not write, or a place that cannot be written to.
    """
    from rankscope.views.figures import drawing_style

    try:
        with drawing_style("--figure", {}):
            drawn.savefig(place, dpi=FIGURE_DOTS)
    except ValueError as error:
        raise InputError(f"--figure {place}: {error}. Use a name that ends in .png, .svg or .pdf.") from error
    except OSError as error:
        raise InputError(f"--figure {place} cannot be written: {error.strerror or error}.") from error


def fail_where(run: Run, conditions: Sequence[Condition]) -> None:
    """Exit with code 1 if a condition holds, after printing where to stderr.

    Raises:
        InputError: a condition cannot be evaluated, because its metric was not measured or is undefined.
    """
    held = [words for condition in conditions if (words := condition.where_met(run.table)) is not None]
    for words in held:
        remarks_console().print(f"failed: {words}", markup=False)
    if held:
        raise typer.Exit(1)
