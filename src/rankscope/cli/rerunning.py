"""``rankscope rerun``: does a saved run reproduce?"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope._types import is_named
from rankscope.cli import parameters
from rankscope.cli.streams import print_json, remarks_console, results_console
from rankscope.errors import InputError
from rankscope.runs.places import place_of
from rankscope.verbs._spec import verbs_in_order

if TYPE_CHECKING:
    from rankscope.runs.reruns import Rerun

PLACES = ("--out", "--figure", "--work")
REACHING = (
    "--text",
    "--inputs",
    "--loss",
    "--labels",
    "--optimizer",
    "--tokenizer",
    "--states",
    "--trust-remote-code",
    "--allow-pickle",
)
SILENT = ("--json", "--quiet", "-q", "--no-progress")


def rerun_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run, written with --out.")],
    out: Annotated[str | None, typer.Option("--out", metavar="DIR", help="Save the new run in this folder.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the command without running it.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Also run a command that names a server or files of this machine.")
    ] = False,
    as_json: parameters.AsJson = False,
    quiet: parameters.Quiet = False,
) -> None:
    """Does a saved run reproduce? Reruns its command and compares every value bit by bit."""
    from rankscope.runs.reruns import judge_rerun
    from rankscope.runs.run import load_run

    old = load_run(run)
    words = command_again(old.provenance.command)
    if show:
        import shlex

        typer.echo(shlex.join(["rankscope", *words]))
        return
    if not trust:
        refuse_reaching(words)
    with tempfile.TemporaryDirectory() as scratch:
        place = out or str(Path(scratch) / "run")
        _run(words, place, quiet=quiet)
        judgement = judge_rerun(old, load_run(place))
    _tell(judgement, as_json=as_json, quiet=quiet)
    if not judgement.same:
        raise typer.Exit(1)


def command_again(command: Sequence[str]) -> list[str]:
    """The arguments of ``rankscope`` that repeat a run, without those for saving and printing it.

    The command comes from a file and is not trusted: only a verb of rankscope is ever started, nothing else.

    Example:
        >>> command_again(["rankscope", "measure", "init:tiny-bert", "--out", "run", "--seed", "3", "--json"])
        ['measure', 'init:tiny-bert', '--seed', '3']

    Raises:
        InputError: the run was not made by one command line of rankscope.
    """
    verbs = [verb.name for verb in verbs_in_order() if verb.makes_runs]
    if len(command) < 2 or command[0] not in ("rankscope", "__main__.py") or command[1] not in verbs:
        shown = " ".join(command)[:200] or "nothing"
        raise InputError(
            f"This run was made by {shown!r}, which is not a single rankscope command ({', '.join(verbs)}). To repeat "
            "a run made from Python, rerun its program; to repeat a reproduction, use `rankscope reproduce`."
        )
    kept: list[str] = []
    skip = False
    for word in command[1:]:
        if skip:
            skip = False
        elif word in PLACES:
            skip = True
        elif word not in SILENT and not word.startswith(tuple(f"{place}=" for place in PLACES)):
            kept.append(str(Path(word).expanduser()) if word.startswith("~/") else word)
    return kept


def refuse_reaching(words: Sequence[str]) -> None:
    """Refuse a command that would read a file or ask a server of its author's choice.

    Raises:
        InputError: it names the word, and how to run the command anyway.
    """
    for word in words:
        if "://" in word or word.partition("=")[0] in REACHING or is_named(word):
            raise InputError(
                f"The command of this run has {word!r:.200}: it reads or runs a file of this machine or asks a "
                "server, and whoever wrote the run chose which. See it with --show; pass --trust if you know the run."
            )


def _run(words: Sequence[str], place: str, *, quiet: bool) -> None:
    # Run the file, not -m, which would look for a package of that name in the current folder first.
    program = Path(__file__).resolve().parents[1] / "__main__.py"
    arguments = [sys.executable, str(program), *words, "--quiet", "--out", place]
    if not quiet:
        remarks_console().print(f"running: rankscope {' '.join(words)}", markup=False)
    done = subprocess.run(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    # Exit code 1 may also come from --fail-if, after a complete run, so check for the file instead.
    if not place_of(place, "out", "a folder").holds("run.json"):
        raise InputError(f"The command failed (exit code {done.returncode}): {done.stderr.strip()[-600:]}")


def _tell(found: Rerun, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json(found.to_json())
    else:
        results_console().print(str(found).splitlines()[0] if quiet else str(found), markup=False)
