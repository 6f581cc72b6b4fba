"""``rankscope measure``."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.cli.streams import print_json, remarks_console, results_console
from rankscope.cli.words import split_names

if TYPE_CHECKING:
    from rankscope.results.run import Run


class TokensPolicy(str, Enum):
    """Which tokens count; padding never does."""

    content = "content"
    no_first = "no-first"
    no_special = "no-special"


def measure_command(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="Hub name, local folder, init:NAME or a config.json.")],
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, readable=True, help="Text file to read instead of the sample."),
    ] = None,
    random_tokens: Annotated[
        bool, typer.Option("--random-tokens", help="Tokens drawn at random instead of text.")
    ] = False,
    sequences: Annotated[int, typer.Option(min=1, help="How many sequences.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per forward pass.")] = 8,
    metrics: Annotated[
        list[str] | None, typer.Option(help="Metrics, with commas or repeated; see `ls metrics`.")
    ] = None,
    sites: Annotated[list[str] | None, typer.Option(help="Sites, with commas or repeated; see `ls sites`.")] = None,
    tokens_policy: Annotated[TokensPolicy, typer.Option(help="Which tokens count.")] = TokensPolicy.content,
    dtype: Annotated[str | None, typer.Option(help="Run in this dtype, e.g. float64.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of a random initialisation and of random tokens.")] = 0,
    null: Annotated[bool, typer.Option("--null", help="Measure random tokens of the same shape as well.")] = False,
    blocks: Annotated[str | None, typer.Option(metavar="PATTERN", help="Name the blocks, e.g. 'layers.*'.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Save the run (Parquet and run.json) here.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The verdict only, no progress.")] = False,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No progress bar.")] = False,
) -> None:
    """Where does this model stand? The battery per block, the float floor and a verdict that names its evidence."""
    import rankscope

    run = rankscope.measure(
        spec,
        text,
        metrics=split_names(metrics),
        sites=split_names(sites),
        sequences=sequences,
        tokens=tokens,
        batch=batch,
        tokens_policy=tokens_policy.value,
        random_tokens=random_tokens,
        dtype=dtype,
        seed=seed,
        null=null,
        blocks=blocks,
        progress=not (quiet or no_progress) and sys.stderr.isatty(),
    )
    if out is not None:
        run.save(out)
    _show(run, as_json=as_json, quiet=quiet, out=out)


def _show(run: Run, *, as_json: bool, quiet: bool, out: Path | None) -> None:
    remarks = remarks_console()
    if as_json:
        print_json(run.to_json())
        if not quiet:
            for note in run.notes:
                remarks.print(f"note: {note}", markup=False)
    elif quiet:
        typer.echo(run.verdict)
    else:
        from rankscope.reporting.terminal import print_run

        print_run(run, results_console())
    if out is not None and not quiet:
        remarks.print(f"saved in {out}", markup=False)
