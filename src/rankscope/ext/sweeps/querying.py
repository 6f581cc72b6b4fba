"""``query``: SQL over the data set of a sweep, in a database that cannot read other files and cannot write."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from rankscope.errors import InputError, MissingExtraError, ResultError
from rankscope.ext.sweeps.results import Contents, Results
from rankscope.ext.sweeps.tasks import COORDINATES
from rankscope.runs.rows import FIXED_COLUMNS

NAMES = ("metric", "site", "stack", "status", "variant", "model", "checkpoint", "task", "verb")
"""Columns of names, which are read as dictionaries: most rows repeat a few."""
RESULT: Mapping[str, pa.DataType] = {
    "verdict": pa.string(), "inputs": pa.string(), "seconds": pa.float64(), "rows": pa.int64(),
    "parameters": pa.int64(), "weights_dtype": pa.string(), "asked_bytes": pa.int64(), "peak_bytes": pa.int64(),
    "finished": pa.string(),
}  # fmt: skip
"""What ``tasks`` says of a finished task."""
CLOSED = (
    "SET python_enable_replacements = false",
    # DuckDB allows its temporary directory, by default .tmp in the current folder, even without external access.
    # Without one, a query that needs more than the memory limit fails.
    "SET temp_directory = ''",
    "SET allowed_directories = []",
    "SET allowed_paths = []",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)
LARGEST_QUERY = 100_000


def query(folder: str | os.PathLike[str], sql: str) -> pa.Table:
    """Run one SELECT over ``rows`` and ``tasks``.

    ``rows`` has the rows of every finished task of the present plan: ``verb``, ``model``, ``checkpoint``, ``step``,
    ``variant``, ``seed``, ``metric``, ``site``, ``stack``, ``layer``, ``head``, ``sequence``, ``value``, ``status``,
    the columns that single verbs add, and ``task``, the key of the task. ``tasks`` has one row per task: its state,
    verdict or reason, inputs, seconds, memory. The SQL is not trusted: it can read no other file, write none, and load
    no extension.

    Args:
        folder: folder or address of the sweep.
        sql: one SELECT in DuckDB's dialect.

    Raises:
        InputError: the SQL is not a SELECT, or DuckDB refuses it; the message quotes DuckDB.
        ResultError: there is no sweep in the folder.
        MissingExtraError: without DuckDB (extra ``sweep``).

    Example:
        >>> import rankscope, tempfile
        >>> folder, small = tempfile.mkdtemp(), {"sequences": 1, "tokens": 8}
        >>> plan = {"models": ["init:tiny-bert"], "verbs": ["measure"], "inputs": small}
        >>> _ = rankscope.sweep(plan, folder, serial=True)
        >>> query(folder, "SELECT max(layer) AS last FROM rows").to_pylist()
        [{'last': 2}]
    """
    try:
        import duckdb
    except ImportError as error:
        raise MissingExtraError("rankscope query", "duckdb", "sweep") from error
    if len(sql) > LARGEST_QUERY:
        raise InputError(f"The query has {len(sql)} characters; more than {LARGEST_QUERY} are not read.")
    contents = Results.at(folder).contents()
    closed = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    with duckdb.connect(":memory:", config=closed) as database:
        _register_rows(database, contents)
        if "tasks" in sql.lower():  # this table has one row per task, so it is built only if the query mentions it
            database.register("tasks", tasks_table(contents))
        # Both tables are registered as objects, so file access can be closed before the SQL runs.
        for setting in CLOSED:
            database.execute(setting)
        try:
            _only_select(duckdb, database, sql)
            answer: pa.Table = database.sql(sql).to_arrow_table()
        except duckdb.Error as error:
            if "stream registered as" in str(error) or "arrow_scan" in str(error):  # Arrow could not read a file
                raise ResultError(f"The rows in {folder} cannot be read: {_last_line(error)}") from error
            raise InputError(f"The query was refused: {' '.join(str(error).split())}") from error
        except (pa.ArrowException, OSError) as error:
            raise ResultError(f"The rows in {folder} cannot be read: {_last_line(error)}") from error
    return answer


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1][:500]


def rows_schema() -> dict[str, pa.DataType]:
    """The columns of ``rows``: those that name a task, and those of every verb; null where a verb lacks one."""
    from rankscope.verbs._spec import VERBS

    fixed = {name: pa.string() if pa.types.is_dictionary(kind) else kind for name, kind in FIXED_COLUMNS.items()}
    own = {name: getattr(pa, kind)() for verb in VERBS.values() for name, kind in verb.columns.items()}
    columns = {**COORDINATES, **fixed, **{name: kind for name, kind in own.items() if name not in COORDINATES}}
    names = pa.dictionary(pa.int32(), pa.string())
    return {name: names if name in NAMES else kind for name, kind in columns.items()}


def _register_rows(database: Any, contents: Contents) -> None:
    """Make the view ``rows`` over all files; Arrow reads them, as DuckDB's own readers do not know every store."""
    schema = rows_schema()
    columns = ", ".join(f'"{name}"' for name in schema)
    parts = []
    for number, (rows, wanted) in enumerate(contents.rows(schema)):
        database.register(f"rows_{number}", rows)
        # A task without rows has one that says so, without a metric.
        where = "metric IS NOT NULL"
        if wanted is not None:
            database.register(f"wanted_{number}", pa.table({"task": sorted(wanted)}))
            where += f" AND task IN (SELECT task FROM wanted_{number})"
        parts.append(f"SELECT {columns} FROM rows_{number} WHERE {where}")
    database.execute(f"CREATE VIEW rows AS {' UNION ALL '.join(parts)}")


def tasks_table(contents: Contents) -> pa.Table:
    """One row per task of the plan, with its state and result."""
    rows = []
    for task in contents.tasks.drop_columns(["chunk"]).to_pylist():
        key = task["task"]
        row = {**task, **dict.fromkeys(RESULT), "reason": None, "state": "missing"}
        if key in contents.done:
            record = contents.records.get(key, {})
            provenance = record.get("provenance")
            facts = {**(provenance if isinstance(provenance, dict) else {}), **record}
            row |= {"state": "done", **{name: _typed(facts.get(name), kind) for name, kind in RESULT.items()}}
        elif key in contents.failures:
            failure = contents.failures[key]
            row |= {name: failure.get(name) for name in ("reason", "seconds", "finished")} | {"state": "failed"}
        rows.append(row)
    schema = pa.schema({
        **COORDINATES, "state": pa.string(), **RESULT, "reason": pa.string(), "description": pa.string()
    })  # fmt: skip
    return pa.Table.from_pylist(rows, schema=schema)


def _typed(value: Any, kind: pa.DataType) -> Any:
    """A value of a record, which may be edited, if it has the expected type."""
    if isinstance(value, bool) or value is None:
        return None
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else None
    if pa.types.is_floating(kind):
        return float(value) if isinstance(value, (int, float)) else None
    return value if isinstance(value, int) and abs(value) < 2**63 else None


def _only_select(duckdb: Any, database: Any, sql: str) -> None:
    statements = database.extract_statements(sql)
    # Not EXPLAIN: EXPLAIN ANALYZE runs what it explains, and that may be a COPY.
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        kinds = ", ".join(str(one.type).rpartition(".")[2] for one in statements) or "nothing"
        raise InputError(f"A query is one SELECT; got {kinds}. The tables are rows and tasks.")
