"""Where output goes: results to stdout, everything else to stderr.

All that the command line prints passes through here, and text of others cannot control the terminal: a name in a file
or in the answer to a query may hold an escape sequence, which is shown instead of carried out.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TextIO

from rankscope._foreign_text import visible

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 120


def results_console() -> Console:
    """A console on stdout; in a pipe, which has no width, wide enough for most tables."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return _console(sys.stdout, width=None if known else PIPE_WIDTH)


def remarks_console() -> Console:
    """A console on stderr."""
    return _console(sys.stderr, soft_wrap=True)


def _console(stream: TextIO, **options: Any) -> Console:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class VisibleConsole(Console):
        """Shows control characters of a text; those of rich itself are styles, not text."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else visible(text), style, control)

    return VisibleConsole(file=stream, highlight=False, **options)


def echo(text: str) -> None:
    """Print a text to stdout."""
    sys.stdout.write(visible(text) + "\n")


def print_json(answer: dict[str, Any]) -> None:
    """Print exactly one JSON object to stdout: no bare NaN, no lone surrogates, escaped if stdout is not UTF-8."""
    text = json.dumps(answer, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace").decode("utf-8")
    if (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8":
        text = json.dumps(json.loads(text))
    echo(text)  # an escaped character has the same form in JSON


def print_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print comma-separated values to stdout."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for row in chain([columns], rows):
        writer.writerow([visible(cell) if isinstance(cell, str) else cell for cell in row])
