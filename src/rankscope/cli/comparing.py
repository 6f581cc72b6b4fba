"""``rankscope compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli import parameters
from rankscope.cli.showing import save_figure
from rankscope.cli.streams import echo, print_json, remarks_console, results_console
from rankscope.cli.verb_commands import split_names


def compare_command(
    a: Annotated[str, typer.Argument(metavar="A", help="Folder or address of a run, written with --out.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Folder of the run to compare it with.")],
    metrics: parameters.Metrics = None,
    site: Annotated[str | None, typer.Option("--site", help="Compare this site only.")] = None,
    paired: Annotated[
        bool | None, typer.Option("--paired/--unpaired", help="Whether to pair the sequences; detected by default.")
    ] = None,
    level: Annotated[float, typer.Option("--level", help="Confidence level of the intervals.")] = 0.95,
    output: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write an HTML report."),
    ] = None,
    figure: parameters.Figure = None,
    as_json: parameters.AsJson = False,
    quiet: parameters.Quiet = False,
) -> None:
    """How do two runs differ? Compares them block by block, with intervals over the sequences."""
    import rankscope

    comparison = rankscope.compare(a, b, metrics=split_names(metrics), site=site, paired=paired, level=level)
    if figure is not None:
        save_figure(comparison.plot(), figure)
    if output is not None:
        rankscope.report([a, b], output, comparison=comparison)
    if as_json:
        print_json(comparison.to_json())
    elif quiet:
        echo(comparison.verdict)
    else:
        from rankscope.runs.compare_show import document
        from rankscope.views.terminal import print_document

        print_document(document(comparison), results_console())
    if output is not None and not quiet:
        remarks_console().print(f"wrote {output}", markup=False)
