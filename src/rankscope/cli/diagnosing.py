"""``rankscope doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from rankscope.cli import parameters
from rankscope.cli.streams import print_json, results_console


def doctor_command(
    spec: parameters.Spec,
    seed: parameters.Seed = 0,
    dtype: parameters.Dtype = None,
    blocks: parameters.Blocks = None,
    layout: parameters.Layout = None,
    tokenizer: parameters.Tokenizer = None,
    as_json: parameters.AsJson = False,
    shapes: Annotated[
        bool, typer.Option("--shapes", help="Only read the headers of the weight files: sizes, no model.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the checks that failed.")] = False,
) -> None:
    """Can the numbers be trusted on this model? Compares traced with plain outputs; lists blocks, skips, limits."""
    import rankscope

    if shapes:
        from rankscope.models.weight_files.shapes import shapes_of

        found = shapes_of(spec)
        print_json(found.to_json()) if as_json else typer.echo(str(found))
        return
    report = rankscope.doctor(spec, seed=seed, dtype=dtype, blocks=blocks, stream=layout, tokenizer=tokenizer)
    if as_json:
        from rankscope.runs.provenance import SCHEMA

        print_json({"schema": SCHEMA, "kind": "doctor", **report.to_json()})
    elif not quiet:
        from rankscope.reporting.terminal import print_doctor

        print_doctor(report, results_console())
    else:
        for check in report.checks:
            if check.status == "fail":
                typer.echo(f"{check.name}: {check.detail}")
    if not report.passed:
        raise typer.Exit(1)
