"""Arguments and options that hand-written commands share with the verbs, from the same declarations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rankscope import options
from rankscope.cli.verb_commands import described

Text = Annotated[
    Path | None, described(options.TEXT.but(flags=("--text",), help="Text file to use instead of the sample text."))
]
Metrics = Annotated[list[str] | None, described(options.METRICS)]
Figure = Annotated[Path | None, described(options.FIGURE)]
AsJson = Annotated[bool, described(options.JSON)]
Quiet = Annotated[bool, described(options.QUIET)]
NoProgress = Annotated[bool, described(options.NO_PROGRESS)]
