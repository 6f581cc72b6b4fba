"""``rankscope query``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.cli import parameters
from rankscope.cli.commands import COMMANDS, Command
from rankscope.cli.streams import print_json, remarks_console, results_console

if TYPE_CHECKING:
    import pyarrow as pa

MOST_LINES = 200


def query_command(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder or address of a sweep.")],
    sql: Annotated[str, typer.Argument(metavar="SQL", help="One SELECT statement over the tables rows and tasks.")],
    as_json: parameters.AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values to stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no messages to stderr.")] = False,
) -> None:
    """What does the sweep say? Runs SQL over all its rows with DuckDB; the query cannot read or write anything else."""
    import rankscope

    answer = rankscope.query(folder, sql)
    if as_json:
        print_json({"kind": "query", "columns": answer.column_names, "rows": _plain_rows(answer)})
    elif as_csv:
        _print_csv(answer)
    else:
        _print_table(answer, quiet=quiet)


def _plain_rows(answer: pa.Table) -> list[dict[str, object]]:
    """Rows in JSON types; a value that is not finite becomes null, a date a string."""

    def plain(value: object) -> object:
        if isinstance(value, float):
            return value if value - value == 0 else None
        return value if value is None or isinstance(value, (bool, int, str)) else str(value)

    return [{name: plain(value) for name, value in row.items()} for row in answer.to_pylist()]


def _print_csv(answer: pa.Table) -> None:
    import csv
    import sys

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(answer.column_names)
    for batch in answer.to_batches():
        writer.writerows(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def _print_table(answer: pa.Table, *, quiet: bool) -> None:
    from rankscope.reporting.terminal import print_entries
    from rankscope.runs.plain_json import visible
    from rankscope.views import number

    def words(value: object) -> str:
        return number(value) if isinstance(value, float) else "" if value is None else visible(value)

    shown = answer.slice(0, MOST_LINES).to_pylist()
    if not shown:
        if not quiet:
            remarks_console().print("no rows", markup=False)
        return
    print_entries([{name: words(value) for name, value in row.items()} for row in shown], results_console())
    if answer.num_rows > MOST_LINES and not quiet:
        remarks_console().print(f"{answer.num_rows - MOST_LINES} more rows; --csv prints all", markup=False)


COMMANDS.add(
    "query",
    Command(
        query_command,
        (
            "sweep example --out plan.yaml",
            "sweep plan.yaml --serial --quiet",
            "query plan 'SELECT model, variant, avg(value) AS residual FROM rows GROUP BY ALL ORDER BY ALL'",
        ),
        70,
    ),
)
