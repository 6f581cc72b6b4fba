"""The command line. Nothing heavy is imported before a command runs, so that ``--help`` is fast."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from rankscope._foreign_text import visible
from rankscope._version import __version__
from rankscope.cli import comparing, environment, listing, reporting
from rankscope.cli.commands import COMMANDS, Command
from rankscope.cli.examples import epilog, question
from rankscope.cli.failing import EXIT_NO_READER, drop_output, escape_unprintable, flush_output, message_of
from rankscope.cli.interrupting import ending_on_request, exit_code, interrupt_behind, is_untold
from rankscope.cli.panels import GroupedCommands, PanelledCommand
from rankscope.cli.processes import one_voice
from rankscope.cli.streams import echo
from rankscope.cli.verb_commands import command_of
from rankscope.errors import RankscopeError
from rankscope.extensions import OURS, installed, missing
from rankscope.verbs._spec import verbs_in_order

EXIT_USAGE = 2
DEBUG_FLAG = "--debug"
DEBUG_VARIABLE = "RANKSCOPE_DEBUG"

app = typer.Typer(
    name="rankscope",
    cls=GroupedCommands,
    help="Find out why your transformer does not learn: measure, explain, predict and prevent rank collapse.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_SAVED = "measure init:tiny-bert --sequences 2 --tokens 16 --quiet --out run"
for _name, _command in {
    "report": Command(reporting.report_command, (_SAVED, "report run -o report.html"), 30),
    "compare": Command(
        comparing.compare_command,
        (
            "measure init:tiny-bert --sequences 4 --tokens 16 --seed 0 --quiet --out run_a",
            "measure init:tiny-bert --sequences 4 --tokens 16 --seed 1 --quiet --out run_b",
            "compare run_a run_b --metrics relative_residual",
        ),
        50,
    ),
    "ls": Command(listing.ls_command, ("ls metrics", "ls presets --json"), 80),
    "env": Command(environment.env_command, ("env",), 90),
}.items():
    COMMANDS.add(_name, _command)


def command_line() -> typer.Typer:
    """The application with a command for every verb in the registry, including verbs declared after the import."""
    app.registered_commands.clear()
    app.registered_groups.clear()
    others = sorted(COMMANDS.items(), key=lambda item: (item[1].order, item[0]))
    commands = {
        **{verb.name: command_of(verb) for verb in verbs_in_order()},
        **{name: command.run for name, command in others},
    }
    for name, run in commands.items():
        if isinstance(run, typer.Typer):
            app.add_typer(run, name=name, epilog=epilog(name), short_help=question(run.info.help))
        else:
            app.command(name, cls=PanelledCommand, epilog=epilog(name), short_help=question(run.__doc__))(run)
    app.info.epilog = _left_out()
    return app


def _left_out() -> str | None:
    """Which commands would come with extensions of rankscope that cannot be used."""
    lost = [f"{name} ({one.problem})" for name, one in installed().items() if one.problem and name in OURS]
    lost += [f"{name} (is not installed)" for name in OURS if name not in installed()]
    return f"Extensions that cannot be used: {', '.join(lost)}." if lost else None


command_line()


def _show_version(asked: bool) -> None:
    if asked:
        echo(f"rankscope {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG_FLAG, help=f"Show the full traceback on errors; also {DEBUG_VARIABLE}=1.")
    ] = False,
) -> None:
    """Find out why your transformer does not learn: measure, explain, predict and prevent rank collapse."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with 0, 1 (a check failed) or 2 (wrong usage, or an error).

    The exit code is 130 after an interrupt and 143 after SIGTERM. This is the only place where an exception becomes an
    error message. ``--debug`` works at any position.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG_FLAG in words or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    escape_unprintable()
    try:
        with ending_on_request(), one_voice(words):
            _run([word for word in words if word != DEBUG_FLAG])
    except RankscopeError as error:
        if debug:
            raise
        _remark(f"error: {' '.join(str(error).split())}", style="red")
        sys.exit(EXIT_USAGE)
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        if (stopped := interrupt_behind(error)) is not None:
            _remark("Interrupted. Nothing was saved.")
            sys.exit(exit_code(stopped))
        sentence = message_of(error)
        if debug:
            raise
        if sentence is None:
            _end_with_traceback()
        sys.stderr.write(f"error: {visible(sentence)}\n")  # no rich: there may be no memory left to import it
        sys.stderr.flush()
        drop_output(2)  # other libraries may fail at exit for the same reason; their messages would hide this one
        sys.exit(EXIT_USAGE)
    except KeyboardInterrupt as stopped:  # interrupted just before or after the command
        sys.exit(exit_code(stopped))
    except Exception:
        if debug:
            raise
        _end_with_traceback()


def _end_with_traceback() -> NoReturn:
    """The user's own code failed, or rankscope has a defect: the traceback is the message.

    Left to Python, the exit code would be 1, which says that a check failed.
    """
    traceback.print_exc()
    sys.exit(EXIT_USAGE)


def _run(words: Sequence[str]) -> None:
    """Run a command and flush its output; exit with the code a shell expects if it was stopped from outside."""
    try:
        try:
            wanted = next((word for word in words if not word.startswith("-")), "")
            if absent := missing(wanted):
                raise absent
            command_line()(args=words, prog_name="rankscope")
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


def _remark(sentence: str, style: str = "") -> None:
    from rich.text import Text

    from rankscope.cli.streams import remarks_console

    remarks_console().print(Text(sentence, style=style))
