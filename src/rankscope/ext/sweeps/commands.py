"""``rankscope sweep``, its commands ``example`` and ``status``, and ``rankscope query``."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rankscope.cli import parameters
from rankscope.cli.commands import COMMANDS, Command
from rankscope.cli.interrupting import telling
from rankscope.cli.showing import wants_progress
from rankscope.cli.streams import echo, print_csv, print_json, remarks_console, results_console
from rankscope.errors import InputError, ResultError

if TYPE_CHECKING:
    from rankscope.ext.sweeps.status import SweepStatus

DEFAULT = "run"
HELP = "How do many models, checkpoints and seeds compare? Runs a plan on Ray into one Parquet data set; can resume."
MOST_LINES = 200
Folder = Annotated[str, typer.Argument(metavar="FOLDER", help="Folder or address of a sweep.")]
NoWords = Annotated[bool, typer.Option("--quiet", "-q", help="Print only failures; no progress bar.")]
NoRemarks = Annotated[bool, typer.Option("--quiet", "-q", help="Print no messages to stderr.")]


class PlanGroup(TyperGroup):
    """A command group whose first argument may also be a plan: ``sweep PLAN`` means ``sweep run PLAN``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert ``run`` if the first argument is not a command."""
        if args and args[0] not in self.commands and args[0] != "--help":
            near = difflib.get_close_matches(args[0], self.commands, n=1, cutoff=0.7)
            if near and not Path(args[0]).exists():
                raise InputError(f"There is no plan {args[0]!r}. Did you mean `rankscope sweep {near[0]}`?")
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Show the options of ``run``, then the other commands."""
        run: Any = self.commands[DEFAULT]
        records = [record for parameter in run.get_params(ctx) if (record := parameter.get_help_record(ctx))]
        with formatter.section("Options"):
            formatter.write_dl(records)
        self.format_commands(ctx, formatter)


sweep_app = typer.Typer(
    cls=PlanGroup,
    help=HELP,
    subcommand_metavar="PLAN | example | status FOLDER",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@sweep_app.command(DEFAULT, hidden=True)
def run_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="YAML file with the plan.")],
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder or address (s3://bucket/name) for the results; default: PLAN without .yaml.",
        ),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option("--chunk", min=1, help="Tasks that share a file; default: as few as make 10,000 files."),
    ] = None,
    serial: Annotated[
        bool, typer.Option("--serial", "--no-ray", help="Run the tasks one by one in this process, without Ray.")
    ] = False,
    address: Annotated[
        str | None, typer.Option("--address", metavar="ADDRESS", help="Ray cluster to run on, e.g. 'auto'.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Cores for a local Ray; default: all.")
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="I/N",
            help="Run one share in one of several processes, without Ray: 0/8 for the first of eight; auto in a Slurm "
            "array or a Kubernetes indexed job.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the tasks and exit.")] = False,
    as_json: parameters.AsJson = False,
    quiet: NoWords = False,
    no_progress: parameters.NoProgress = False,
) -> None:
    """Run every task of a plan that has no result yet. The exit code is 1 if any task failed."""
    import rankscope

    if dry_run:
        _list_tasks(plan, as_json=as_json)
        return
    place = out or str(plan.with_suffix("") if plan.suffix else plan.with_name(f"{plan.name}.sweep"))
    progress = wants_progress(quiet=quiet, no_progress=no_progress)
    if progress:
        remarks_console().print(f"Reading {plan} ...", markup=False, style="dim")
    with telling(lambda: _so_far(place)):
        status = rankscope.sweep(
            plan, place, chunk=chunk, serial=serial, address=address, workers=workers, shard=shard, progress=progress
        )
    if not quiet:
        remarks_console().print(f"saved in {place}", markup=False)
    _show(status, as_json=as_json, quiet=quiet)


def _list_tasks(plan: Path, *, as_json: bool) -> None:
    from rankscope.ext.sweeps.plan import plan_of
    from rankscope.ext.sweeps.tasks import tasks_of

    tasks = list(tasks_of(plan_of(plan)))
    if as_json:
        print_json({"kind": "tasks", "tasks": [{"key": task.key, **task.facts} for task in tasks]})
        return
    for task in tasks:
        echo(f"{task.key}  {task.title}")


def _so_far(place: str) -> str:
    from rankscope.ext.sweeps.status import status_of

    try:
        counts = status_of(place).counts
    except ResultError:
        return "No task was started."
    finished = f"{counts['done']} of {sum(counts.values())} tasks"
    return f"{finished} are complete in {place}. The same command runs the rest."


def _show(status: SweepStatus, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json(status.to_json())
    elif not quiet or status.failures:
        echo(str(status))
    if status.counts["failed"]:
        raise typer.Exit(1)


@sweep_app.command("example")
def example_command(
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="File to write; default: stdout.")
    ] = None,
    quiet: NoRemarks = False,
) -> None:
    """What does a plan look like? Prints a small plan that runs within seconds and explains every key."""
    from rankscope.ext.sweeps.example import EXAMPLE_PLAN

    if out is None:
        echo(EXAMPLE_PLAN.rstrip("\n"))
        return
    try:
        with out.open("x", encoding="utf-8") as stream:
            stream.write(EXAMPLE_PLAN)
    except OSError as error:
        raise InputError(
            f"--out {out} cannot be written: {error.strerror}. An existing file is not overwritten."
        ) from error
    if not quiet:
        remarks_console().print(f"wrote {out}; run it with: rankscope sweep {out}", markup=False)


@sweep_app.command("status")
def status_command(folder: Folder, as_json: parameters.AsJson = False, quiet: NoWords = False) -> None:
    """How far is the sweep? Counts finished, failed and pending tasks. The exit code is 1 if any task failed."""
    from rankscope.ext.sweeps.status import status_of

    status = status_of(folder)
    if not (as_json or quiet):
        from rankscope.reporting.terminal import print_entries

        rows = [
            {"model": model, "verb": verb, **{state: str(count) for state, count in counts.items()}}
            for (model, verb), counts in status.groups.items()
        ]
        print_entries(rows, results_console())
    _show(status, as_json=as_json, quiet=quiet)


def query_command(
    folder: Folder,
    sql: Annotated[str, typer.Argument(metavar="SQL", help="One SELECT statement over the tables rows and tasks.")],
    as_json: parameters.AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values to stdout.")] = False,
    quiet: NoRemarks = False,
) -> None:
    """What does the sweep say? Runs SQL over all its rows with DuckDB; the query cannot read or write anything else."""
    import rankscope
    from rankscope._foreign_text import visible
    from rankscope.reporting.terminal import print_entries
    from rankscope.views import number

    def plain(value: object) -> object:
        """In JSON types; a value that is not finite becomes null, a date a string."""
        if isinstance(value, float):
            return value if value - value == 0 else None
        return value if value is None or isinstance(value, (bool, int, str)) else str(value)

    def words(value: object) -> str:
        return number(value) if isinstance(value, float) else "" if value is None else visible(value)

    answer = rankscope.query(folder, sql)
    names, shown = answer.column_names, answer if as_json or as_csv else answer.slice(0, MOST_LINES)
    try:
        rows = list(zip(*(column.to_pylist() for column in shown.columns), strict=True))
    except (ValueError, OverflowError) as error:  # such as an infinite date
        raise InputError(f"The answer holds a value that Python cannot hold: {error}. Cast it to VARCHAR.") from error
    if as_json:
        print_json(
            {
                "kind": "query",
                "columns": names,
                "rows": [dict(zip(names, map(plain, row), strict=True)) for row in rows],
            }
        )
    elif as_csv:
        print_csv(names, rows)
    else:
        if rows:
            heads = [visible(name) for name in names]
            print_entries([dict(zip(heads, map(words, row), strict=True)) for row in rows], results_console())
        elif not quiet:
            remarks_console().print("no rows", markup=False)
        if answer.num_rows > MOST_LINES and not quiet:
            remarks_console().print(f"{answer.num_rows - MOST_LINES} more rows; --csv prints all", markup=False)


SWEEP_EXAMPLES = (
    "sweep example --out plan.yaml",
    "sweep plan.yaml --serial",
    "sweep status plan",
)
QUERY_EXAMPLES = (
    "sweep example --out plan.yaml",
    "sweep plan.yaml --serial --quiet",
    "query plan 'SELECT model, variant, avg(value) AS residual FROM rows GROUP BY ALL ORDER BY ALL'",
)
COMMANDS.add("sweep", Command(sweep_app, SWEEP_EXAMPLES, 100))
COMMANDS.add("query", Command(query_command, QUERY_EXAMPLES, 70))
