"""Prints runs and lists to a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from rankscope.reporting.states import state_of
from rankscope.runs.presenting import document_of, showing
from rankscope.runs.run import Run
from rankscope.views import Column, Table
from rankscope.views.terminal import WORDS_WIDTH, print_document, print_table


def print_run(run: Run, console: Console) -> None:
    """Print the same tables as ``print(run)``, with the trend of each metric, then the verdict."""
    with showing(run):
        print_document(document_of(run), console, tone=state_of(run)[0])


def print_entries(rows: Sequence[Mapping[str, str]], console: Console) -> None:
    """Print named entries, one per line, with the columns in the order of the first one."""
    if not rows:
        console.print("nothing registered")
        return
    columns = []
    for place, name in enumerate(rows[0]):
        wordy = max(len(row[name]) for row in rows) > WORDS_WIDTH
        columns.append(Column(name, align="left", width="wide" if wordy else "", spare=0 if wordy else place))
    print_table(Table(columns, [list(row.values()) for row in rows]), console)
