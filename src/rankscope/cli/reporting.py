"""``rankscope report`` and ``rankscope card``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.streams import remarks_console

Runs = Annotated[
    list[str], typer.Argument(metavar="RUN", help="One or more folders or addresses written with --out or by a Gauge.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")]
Page = Annotated[
    Path,
    typer.Option("--out", "-o", metavar="FILE", help="HTML file."),
]


def report_command(
    runs: Runs,
    output: Page = Path("report.html"),
    title: Annotated[str | None, typer.Option("--title", help="Title of the page.")] = None,
    quiet: Quiet = False,
) -> None:
    """What do saved runs show? Writes one HTML file with verdict, curves, ledger, maps, provenance; works offline."""
    import rankscope

    written = rankscope.report(runs, output, title=title)
    if not quiet:
        size = written.stat().st_size / 1000
        remarks_console().print(f"wrote {written} ({size:.0f} kB)", markup=False)


def card_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder or address written with --out.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Write card.md, strip.svg and model-index.yaml.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """What do I put on the model card? Prints Markdown; --out adds a picture and the Hub's evaluation results."""
    import rankscope

    made = rankscope.card(run)
    if out is not None:
        made.save(out)
    if not quiet:
        if out is None:
            typer.echo(made.markdown, nl=False)
        else:
            remarks_console().print(f"saved in {out}", markup=False)
