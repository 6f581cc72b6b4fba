"""``query``: SQL over the data set of a sweep, in a database that cannot read other files and cannot write."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from rankscope._types import path_of
from rankscope.errors import InputError, MissingExtraError
from rankscope.ext.sweeps.folder import ROWS, Contents, Expected, SweepFolder
from rankscope.ext.sweeps.packs import NAMES, SUMMARY
from rankscope.runs.rows import FIXED_COLUMNS

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
    return home.read(lambda contents: _answer(duckdb, contents, expected, sql))


def _answer(duckdb: Any, contents: Contents, expected: list[Expected], sql: str) -> pa.Table:
    closed = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    with duckdb.connect(":memory:", config=closed) as database:
        _register_rows(database, contents, expected)
        if "tasks" in sql.lower():  # this table has one row per task, so it is built only if the query mentions it
            database.register("tasks", tasks_table(contents, expected))
        # Both tables are registered as objects, so file access can be closed before the SQL runs.
        for setting in CLOSED:
            database.execute(setting)
        try:
            _only_select(duckdb, database, sql)
            answer: pa.Table = database.sql(sql).to_arrow_table()
        except duckdb.Error as error:
            raise InputError(f"The query was refused: {' '.join(str(error).split())}") from error
    return answer


def _register_rows(database: Any, contents: Contents, expected: list[Expected]) -> None:
    """Make ``rows`` of the tasks with files of their own and of the packs."""
    loose = loose_dataset(contents, expected)
    if not contents.packs:
        database.register("rows", loose)
        return
    names = ds.ParquetFileFormat(read_options=ds.ParquetReadOptions(dictionary_columns=list(NAMES)))
    schema = pa.schema([
        field.with_type(pa.dictionary(pa.int32(), pa.string())) if field.name in NAMES else field
        for field in rows_schema()
    ])  # fmt: skip
    database.register("loose", loose)
    for pack in contents.packs:
        pack.check("rows")
    packed = ds.dataset([str(pack.rows_file) for pack in contents.packs], schema=schema, format=names)
    database.register("packed", packed)
    planned = {one.key for one in expected}
    where = ""
    if any(not pack.keys <= planned for pack in contents.packs):
        database.register("planned", pa.table({"task": sorted(planned)}))
        where = " WHERE task IN (SELECT task FROM planned)"
    columns = ", ".join(f'"{name}"' for name in schema.names)
    database.execute(f"CREATE VIEW rows AS SELECT {columns} FROM loose UNION ALL SELECT {columns} FROM packed{where}")


def rows_schema() -> pa.Schema:
    """The columns of ``rows``: those of every verb, and those that name a task."""
    fixed = {name: pa.string() if pa.types.is_dictionary(kind) else kind for name, kind in FIXED_COLUMNS.items()}
    from rankscope.verbs._spec import VERBS

    own = {name: kind for verb in VERBS.values() for name, kind in verb.columns.items()}
    further = {name: getattr(pa, kind)() for name, kind in own.items() if name not in COORDINATES}
    return pa.schema({**COORDINATES, **fixed, **further, **{field.name: field.type for field in PARTITIONS}})


def loose_dataset(contents: Contents, expected: list[Expected]) -> ds.Dataset:
    """The rows of tasks with files of their own, read file by file; columns that a verb does not have are null."""
    home, schema = contents.folder.home, rows_schema()
    files = [str(contents.checked_rows(one)) for one in expected if one.key in contents.loose]
    if not files:
        return ds.dataset(schema.empty_table())
    return ds.dataset(
        files,
        schema=schema,
        format="parquet",
        partitioning=ds.partitioning(PARTITIONS, flavor="hive"),
        partition_base_dir=str(home / ROWS),
    )


def tasks_table(contents: Contents, expected: list[Expected]) -> pa.Table:
    """One row per task of the plan, with its state and result."""
    known = {field.name: field.type for field in SUMMARY if field.name != "key"}
    schema = pa.schema({
        "verb": pa.string(), **COORDINATES, "state": pa.string(), **known, "reason": pa.string(),
        "description": pa.string(),
    })  # fmt: skip
    summaries = contents.summaries({one.key for one in expected})
    empty = dict.fromkeys(known)
    rows = []
    for one in expected:
        row = {**empty, **summaries.get(one.key, {}), "reason": None, "state": "missing"}
        if one.key in summaries:
            row["state"] = "done"
        elif one.key in contents.failed:
            failure = contents.folder.failure(one.key)
            row |= {name: failure.get(name) for name in ("reason", "seconds", "finished")} | {"state": "failed"}
        row |= {name: one.task.get(name) for name in ("verb", "model", "checkpoint", "step", "variant", "seed")}
        rows.append({**row, "task": one.key, "description": json.dumps(dict(one.task), ensure_ascii=False)})
    return pa.Table.from_pylist(rows, schema=schema)


def _only_select(duckdb: Any, database: Any, sql: str) -> None:
    statements = database.extract_statements(sql)
    # Not EXPLAIN: EXPLAIN ANALYZE runs what it explains, and that may be a COPY.
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        kinds = ", ".join(str(one.type).rpartition(".")[2] for one in statements) or "nothing"
        raise InputError(f"A query is one SELECT; got {kinds}. The tables are rows and tasks.")
