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
    remedying,
    reporting,
    reproducing,
    selftesting,
)
from rankscope.cli.examples import epilog, question

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
app.command("report")(reporting.report_command)
app.command("compare")(comparing.compare_command)
app.command("play")(playing.play_command)
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
    """Run the command line and leave with 0, 1 (a check failed) or 2 (wrong use or an error rankscope explains).

    The one place where an error becomes a line for a person. ``--debug`` works at any position.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG_FLAG in words or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    try:
        app(args=[word for word in words if word != DEBUG_FLAG], prog_name="rankscope")
    except RankscopeError as error:
        if debug:
            raise
        _explain(error)
        sys.exit(EXIT_USAGE)


def _explain(error: RankscopeError) -> None:
    from rich.text import Text

    from rankscope.cli.streams import remarks_console

    sentence = " ".join(str(error).split())
    remarks_console().print(Text(f"error: {sentence}", style="red"))
