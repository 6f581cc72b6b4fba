"""``rankscope reproduce``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli import parameters
from rankscope.cli.commands import COMMANDS, Command
from rankscope.cli.interrupting import keeping
from rankscope.cli.showing import wants_progress
from rankscope.cli.streams import print_json, remarks_console, results_console


def reproduce_command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Figure to reproduce; see --list.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the available figures.")] = False,
    small: Annotated[
        bool,
        typer.Option("--small", help="Use tiny models, to check shapes in seconds; not comparable with the paper."),
    ] = False,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Number of random initialisations to average.")
    ] = None,
    bert: Annotated[
        str | None, typer.Option("--bert", metavar="SPEC", help="The original BERT: folder or hub name.")
    ] = None,
    albert: Annotated[str | None, typer.Option("--albert", metavar="SPEC", help="The original ALBERT.")] = None,
    xlnet: Annotated[str | None, typer.Option("--xlnet", metavar="SPEC", help="The original XLNet.")] = None,
    text: parameters.Text = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="ROW", help="Compute this row of a table only; repeatable.")
    ] = None,
    saved: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="Plot and describe a saved run instead of measuring.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write data, figures (PNG, SVG) and text here.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", metavar="DIR", file_okay=False, help="Folder for finished parts, so that a killed run can resume."
        ),
    ] = None,
    as_json: parameters.AsJson = False,
    quiet: parameters.Quiet = False,
    no_progress: parameters.NoProgress = False,
) -> None:
    """Is the paper right? Reproduces a published figure and compares it with the published numbers."""
    if listing:
        _list(as_json=as_json)
        return
    from rankscope.ext.papers.reproducing import reproduce, text_of, write_reproduction

    if saved is not None:
        from rankscope.runs.run import Run

        run = Run.load(saved)
    elif name is None:
        raise typer.BadParameter("Name a figure, or pass --list to see which there are.", param_hint="NAME")
    else:
        given = {"bert": bert, "albert": albert, "xlnet": xlnet}
        with keeping(otherwise=lambda: _so_far(keep)):
            run = reproduce(
                name,
                small=small,
                seeds=seeds,
                checkpoints={key: spec for key, spec in given.items() if spec is not None},
                text=text,
                progress=wants_progress(quiet=quiet, no_progress=no_progress),
                keep=keep,
                only=only or (),
            )
    written = [] if out is None else write_reproduction(run, out)
    if as_json:
        print_json(run.to_json())
    elif quiet:
        typer.echo(run.verdict)
    else:
        typer.echo(text_of(run), nl=False)
    if written and not quiet:
        remarks_console().print(f"written: {', '.join(path.name for path in written)} in {out}", markup=False)


def _so_far(keep: Path | None) -> str:
    if keep is None:
        return "Nothing was written: with --keep DIR a long reproduction can resume."
    parts = len(list(keep.glob("*.json"))) if keep.is_dir() else 0
    return f"{parts} finished parts are kept in {keep}. The same command resumes from them."


def _list(*, as_json: bool) -> None:
    from rankscope.ext.papers._spec import REPRODUCTIONS

    entries = [entry.facts() for entry in REPRODUCTIONS.values()]
    if as_json:
        from rankscope.runs.provenance import SCHEMA

        print_json({"schema": SCHEMA, "kind": "reproductions", "entries": entries})
        return
    from rankscope.reporting.terminal import print_entries

    shown = [{"name": str(e["name"]), "shows": str(e["title"]), "minutes": f"{e['minutes']:g}"} for e in entries]
    print_entries(shown, results_console())


COMMANDS.add(
    "reproduce",
    Command(
        reproduce_command,
        (
            "reproduce --list",
            "reproduce dong2021-path-census --small --out census",
            "reproduce mechanisms --small --only fourier",
        ),
        10,
    ),
)
