"""``rankscope selftest``."""

from __future__ import annotations

from typing import Annotated

import typer

from rankscope.cli.streams import print_json


def selftest_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing; the exit code gives the result.")
    ] = False,
) -> None:
    """Are the numbers right on this machine? Recomputes a table of known values and compares every digit."""
    import rankscope

    result = rankscope.selftest()
    if as_json:
        print_json(result.to_json())
    elif not quiet:
        typer.echo(str(result))
    if not result.passed:
        raise typer.Exit(1)
