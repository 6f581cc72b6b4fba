"""Arguments and options that hand-written commands share with the verbs, from the same declarations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rankscope import options
from rankscope.cli.verb_commands import typer_option

Text = Annotated[
    Path | None,
    typer_option(options.TEXT.replace(flags=("--text",), help="Text file to use instead of the sample text.")),
]
Metrics = Annotated[list[str] | None, typer_option(options.METRICS)]
Figure = Annotated[Path | None, typer_option(options.FIGURE)]
AsJson = Annotated[bool, typer_option(options.JSON)]
Quiet = Annotated[bool, typer_option(options.QUIET)]
NoProgress = Annotated[bool, typer_option(options.NO_PROGRESS)]
