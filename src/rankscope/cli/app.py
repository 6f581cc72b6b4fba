"""The command line. Nothing heavy is imported before a command runs, so that ``--help`` is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from rankscope._errors import RankscopeError
from rankscope._version import __version__
from rankscope.cli import (
    ablating,
    bounding,
    comparing,
    decomposing,
    diagnosing,
    environment,
    exacting,
    graphing,
    listing,
    measuring,
    playing,
    predicting,
    querying,
    remedying,
    reporting,
    reproducing,
    rerunning,
    selftesting,
    sweeping,
)
from rankscope.cli.examples import epilog, question
from rankscope.cli.failing import EXIT_NO_READER, drop_output, flush_output, told, tolerate_every_letter
from rankscope.cli.interrupting import ending_on_request, exit_code, is_untold
from rankscope.cli.processes import one_voice

EXIT_FAILED = 1
EXIT_USAGE = 2
DEBUG_FLAG = "--debug"
DEBUG_VARIABLE = "RANKSCOPE_DEBUG"

app = typer.Typer(
    name="rankscope",
    help="Measure, explain, predict and prevent rank collapse in your own transformer.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("measure")(measuring.measure_command)
app.command("ablate")(ablating.ablate_command)
app.command("decompose")(decomposing.decompose_command)
app.command("exact")(exacting.exact_command)
app.command("bound")(bounding.bound_command)
app.command("masks")(graphing.masks_command)
app.command("remedy")(remedying.remedy_command)
app.command("predict")(predicting.predict_command)
app.command("reproduce")(reproducing.reproduce_command)
app.command("rerun")(rerunning.rerun_command)
app.command("report")(reporting.report_command)
app.command("compare")(comparing.compare_command)
app.command("play")(playing.play_command)
app.add_typer(sweeping.sweep_app, name="sweep", epilog=epilog("sweep"), short_help=question(sweeping.HELP))
app.command("query")(querying.query_command)
app.command("doctor")(diagnosing.doctor_command)
app.command("ls")(listing.ls_command)
app.command("env")(environment.env_command)
app.command("selftest")(selftesting.selftest_command)
for command in app.registered_commands:
    command.epilog = epilog(str(command.name))
    command.short_help = question(command.callback.__doc__ if command.callback else None)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"rankscope {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG_FLAG, help=f"Show the traceback of an error; also {DEBUG_VARIABLE}=1.")
    ] = False,
) -> None:
    """Measure, explain, predict and prevent rank collapse in your own transformer."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with 0, 1 (a check failed), 2 (wrong use or an error rankscope explains).

    Interrupted it leaves with 130, asked to end (SIGTERM) with 143. The one place where an error becomes a line for a
    person. ``--debug`` works at any position.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG_FLAG in words or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    tolerate_every_letter()
    try:
        with ending_on_request(), one_voice(words):
            _run([word for word in words if word != DEBUG_FLAG])
    except RankscopeError as error:
        if debug:
            raise
        _remark(f"error: {' '.join(str(error).split())}", style="red")
        sys.exit(EXIT_USAGE)
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        sentence = told(error)
        if debug or sentence is None:
            raise
        sys.stderr.write(f"error: {sentence}\n")  # plainly: there may be no memory left for colours
        sys.stderr.flush()
        drop_output(2)  # libraries that fail for the same reason while they are left would only bury it
        sys.exit(EXIT_USAGE)
    except KeyboardInterrupt as stopped:  # a moment before or behind the command
        sys.exit(exit_code(stopped))


def _run(words: Sequence[str]) -> None:
    """Run a command and write its output out; leave as a shell expects where it was stopped from outside."""
    try:
        try:
            app(args=words, prog_name="rankscope")
        finally:
            flush_output()
    except BrokenPipeError:
        sys.exit(EXIT_NO_READER)
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):
            drop_output()
            sys.exit(EXIT_NO_READER)
        if not is_untold(left):
            raise
        _remark("Interrupted. Nothing was saved.")
        sys.exit(exit_code(left))


def _remark(told: str, style: str = "") -> None:
    from rich.text import Text

    from rankscope.cli.streams import remarks_console

    remarks_console().print(Text(told, style=style))
