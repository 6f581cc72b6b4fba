"""Arguments and options that hand-written commands share with the verbs, from the same declarations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rankscope import options
from rankscope.cli.verb_commands import described

Spec = Annotated[str, described(options.MODEL)]
Text = Annotated[Path | None, described(options.TEXT)]
Tokenizer = Annotated[str | None, described(options.TOKENIZER)]
Metrics = Annotated[list[str] | None, described(options.METRICS)]
Seed = Annotated[int, described(options.SEED)]
Dtype = Annotated[str | None, described(options.DTYPE)]
Blocks = Annotated[str | None, described(options.BLOCKS)]
Layout = Annotated[str | None, described(options.LAYOUT)]
Figure = Annotated[Path | None, described(options.FIGURE)]
AsJson = Annotated[bool, described(options.JSON)]
Quiet = Annotated[bool, described(options.QUIET)]
NoProgress = Annotated[bool, described(options.NO_PROGRESS)]
