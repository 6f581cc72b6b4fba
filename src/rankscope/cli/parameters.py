"""Arguments and options that several commands share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.completing import complete_site, complete_spec


class TokensPolicy(str, Enum):
    """Which tokens count; padding never does."""

    content = "content"
    no_first = "no-first"
    no_special = "no-special"


Spec = Annotated[
    str,
    typer.Argument(
        metavar="SPEC", help="Hub name, local folder, init:NAME or a config.json.", autocompletion=complete_spec
    ),
]
Text = Annotated[
    Path | None,
    typer.Option("--text", exists=True, dir_okay=False, readable=True, help="Text file to read instead of the sample."),
]
Tokenizer = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="NAME", help="Hub name or folder of the tokenizer, if the model has none."),
]
RandomTokens = Annotated[bool, typer.Option("--random-tokens", help="Tokens drawn at random instead of text.")]
Sequences = Annotated[int, typer.Option("--sequences", min=1, help="How many sequences.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Tokens per sequence.")]
BatchSize = Annotated[int, typer.Option("--batch", min=1, help="Sequences per forward pass.")]
Metrics = Annotated[
    list[str] | None, typer.Option("--metrics", help="Metrics, with commas or repeated; see `ls metrics`.")
]
Sites = Annotated[
    list[str] | None,
    typer.Option("--sites", help="Sites, with commas or repeated; see `ls sites`.", autocompletion=complete_site),
]
Policy = Annotated[TokensPolicy, typer.Option("--tokens-policy", help="Which tokens count.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="Run in this dtype, e.g. float64.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of a random initialisation and of random tokens.")]
Blocks = Annotated[str | None, typer.Option("--blocks", metavar="PATTERN", help="Name the blocks, e.g. 'layers.*'.")]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout", metavar="AXES", help="Where the residual stream is, e.g. 'batch dim tokens', slot=1, skips=around."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Save the run (Parquet and run.json) here.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="The verdict only, no progress.")]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="No progress bar.")]
Figure = Annotated[Path | None, typer.Option("--figure", metavar="FILE", help="Draw it: .png, .svg or .pdf.")]
