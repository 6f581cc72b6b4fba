"""``query``: SQL over the data set of a sweep, in a database that cannot read other files and cannot write."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from rankscope._deferred import resolve
from rankscope._types import path_of
from rankscope.errors import InputError, MissingExtraError, ResultError
from rankscope.runs.rows import FIXED_COLUMNS
from rankscope.runs.sweep_folder import ROWS, Expected, SweepFolder

COORDINATES: Mapping[str, pa.DataType] = {
    "task": pa.string(),
    "model": pa.string(),
    "checkpoint": pa.string(),
    "step": pa.int64(),
    "variant": pa.string(),
    "seed": pa.int64(),
}
PARTITIONS = pa.schema([("verb", pa.string()), ("model_key", pa.string())])
CLOSED = (
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)
LARGEST_QUERY = 100_000


def query(folder: str | os.PathLike[str], sql: str) -> pa.Table:
    """Run one SELECT over ``rows`` and ``tasks``.

    ``rows`` has the rows of every finished task of the present plan: ``verb``, ``model``, ``checkpoint``, ``step``,
    ``variant``, ``seed``, ``metric``, ``site``, ``stack``, ``layer``, ``head``, ``sequence``, ``value``, ``status``,
    the columns that single verbs add, and ``task``, the key of the task. ``tasks`` has one row per task: its state,
    verdict or reason, inputs, seconds, bytes. The SQL is not trusted: it can read no other file, write none, and load
    no extension.

    Args:
        folder: of the sweep.
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
    home = SweepFolder(path_of(folder, "folder", "the folder of a sweep"))
    expected = home.expected()
    closed = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    with duckdb.connect(":memory:", config=closed) as database:
        database.register("rows", rows_dataset(home, expected))
        if "tasks" in sql.lower():  # this table reads one record per task, so it is built only if the query mentions it
            database.register("tasks", tasks_table(home, expected))
        # Both tables are registered as objects, so file access can be closed before the SQL runs.
        for setting in CLOSED:
            database.execute(setting)
        try:
            _only_select(duckdb, database, sql)
            answer: pa.Table = database.sql(sql).to_arrow_table()
        except duckdb.Error as error:
            raise InputError(f"The query was refused: {' '.join(str(error).split())}") from error
    return answer


def rows_dataset(home: SweepFolder, expected: list[Expected]) -> ds.Dataset:
    """The rows of the finished tasks, read file by file; columns that a verb does not have are null."""
    done = home.done()
    files = [str(home.home / one.rows_file) for one in expected if one.key in done]
    absent = [name for name in files if not os.path.isfile(name)]
    if absent:
        raise ResultError(f"{absent[0]} is gone, though its task is done. Remove its record and run the sweep again.")
    fixed = {name: pa.string() if pa.types.is_dictionary(kind) else kind for name, kind in FIXED_COLUMNS.items()}
    own = {name: kind for verb in resolve("verbs._spec:VERBS").values() for name, kind in verb.columns.items()}
    further = {name: getattr(pa, kind)() for name, kind in own.items() if name not in COORDINATES}
    schema = pa.schema({**COORDINATES, **fixed, **further, **{field.name: field.type for field in PARTITIONS}})
    if not files:
        return ds.dataset(schema.empty_table())
    return ds.dataset(
        files,
        schema=schema,
        format="parquet",
        partitioning=ds.partitioning(PARTITIONS, flavor="hive"),
        partition_base_dir=str(home.home / ROWS),
    )


def tasks_table(home: SweepFolder, expected: list[Expected]) -> pa.Table:
    """One row per task of the plan, with its state and result."""
    done, failed = home.done(), home.failed()
    schema = pa.schema({
        "verb": pa.string(), **COORDINATES,
        "state": pa.string(), "verdict": pa.string(), "inputs": pa.string(), "reason": pa.string(),
        "seconds": pa.float64(), "rows": pa.int64(), "bytes": pa.int64(), "parameters": pa.int64(),
        "weights_dtype": pa.string(), "asked_bytes": pa.int64(), "peak_bytes": pa.int64(), "finished": pa.string(),
        "description": pa.string(),
    })  # fmt: skip
    found = []
    for one in expected:
        state = "done" if one.key in done else "failed" if one.key in failed else "missing"
        record = home.record(one.key) if state == "done" else home.failure(one.key) if state == "failed" else {}
        found.append(_task_row(one, state, record))
    return pa.Table.from_pylist(found, schema=schema)


def _task_row(one: Expected, state: str, record: Mapping[str, Any]) -> dict[str, Any]:
    provenance = record.get("provenance") or {}
    return {
        "task": one.key,
        **{name: one.task.get(name) for name in ("verb", "model", "checkpoint", "step", "variant", "seed")},
        "state": state,
        **{
            name: record.get(name) for name in ("verdict", "reason", "seconds", "asked_bytes", "peak_bytes", "finished")
        },
        **{name: (record.get("table") or {}).get(name) for name in ("rows", "bytes")},
        **{name: provenance.get(name) for name in ("inputs", "parameters", "weights_dtype")},
        "description": json.dumps(dict(one.task), ensure_ascii=False),
    }


def _only_select(duckdb: Any, database: Any, sql: str) -> None:
    statements = database.extract_statements(sql)
    allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
    if len(statements) != 1 or statements[0].type not in allowed:
        kinds = ", ".join(str(one.type).rpartition(".")[2] for one in statements) or "nothing"
        raise InputError(f"A query is one SELECT; got {kinds}. The tables are rows and tasks.")
