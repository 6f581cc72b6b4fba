"""``rankscope report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.streams import remarks_console

Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN",
        help="One or more folders or addresses written with --out or by a Gauge, or a .jsonl file of block statistics.",
    ),
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
