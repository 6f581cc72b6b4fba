"""Where output goes: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 120


def results_console() -> Console:
    """A console on stdout; in a pipe, which has no width, wide enough for most tables."""
    from rich.console import Console

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(file=sys.stdout, width=None if known else PIPE_WIDTH, highlight=False)


def remarks_console() -> Console:
    """A console on stderr."""
    from rich.console import Console

    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def print_json(answer: dict[str, Any]) -> None:
    """Print exactly one JSON object to stdout: no bare NaN, no lone surrogates, escaped if stdout is not UTF-8."""
    text = json.dumps(answer, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace").decode("utf-8")
    if (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8":
        text = json.dumps(json.loads(text))
    sys.stdout.write(text + "\n")
