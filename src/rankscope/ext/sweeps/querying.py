"""``query``: SQL over the data set of a sweep, in a database that cannot read other files and cannot write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from rankscope.errors import InputError, MissingExtraError, ResultError
from rankscope.ext.sweeps.results import FAILURE_COLUMNS, ROWS, Contents, Results
from rankscope.ext.sweeps.tasks import COORDINATES, RECORD
from rankscope.runs.rows import FIXED_COLUMNS

NAMES = ("metric", "site", "stack", "status", "variant", "model", "checkpoint", "task", "verb")
"""Columns of names, which are read as dictionaries: most rows repeat a few."""
TASKS = """
CREATE VIEW tasks AS
SELECT
    plan.* EXCLUDE (chunk, description),
    CASE WHEN known.task IS NOT NULL THEN 'done' WHEN failed.task IS NOT NULL THEN 'failed' ELSE 'missing' END AS state,
    record->>'$.verdict' AS verdict,
    record->>'$.provenance.inputs' AS inputs,
    coalesce(TRY_CAST(record->>'$.seconds' AS DOUBLE), failed.seconds) AS seconds,
    TRY_CAST(record->>'$.rows' AS BIGINT) AS rows,
    TRY_CAST(record->>'$.provenance.parameters' AS BIGINT) AS parameters,
    record->>'$.provenance.weights_dtype' AS weights_dtype,
    TRY_CAST(record->>'$.asked_bytes' AS BIGINT) AS asked_bytes,
    TRY_CAST(record->>'$.peak_bytes' AS BIGINT) AS peak_bytes,
    coalesce(record->>'$.finished', failed.finished) AS finished,
    failed.reason,
    plan.description
FROM plan LEFT JOIN records AS known USING (task) LEFT JOIN failed USING (task)
"""
CLOSED = (
    "SET python_enable_replacements = false",
    # DuckDB allows its temporary directory, by default .tmp in the current folder, even without external access.
    # Without one, a query that needs more than the memory limit fails.
    "SET temp_directory = ''",
    "SET allowed_directories = []",
    "SET allowed_paths = []",
    "SET secret_directory = ''",
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
    if len(sql) > LARGEST_QUERY:
        raise InputError(f"The query has {len(sql)} characters; more than {LARGEST_QUERY} are not read.")
    with database_of(Results.at(folder).contents(), has_tasks="tasks" in sql.lower()) as database:
        # The data are registered as objects, so file access can be closed before the SQL runs.
        for setting in CLOSED:
            database.execute(setting)
        statements = database.extract_statements(sql)
        # Not EXPLAIN: EXPLAIN ANALYZE runs what it explains, and that may be a COPY.
        kinds = [str(one.type).rpartition(".")[2] for one in statements]
        if kinds != ["SELECT"]:
            words = ", ".join(kinds) or "nothing"
            raise InputError(f"A query is one SELECT; got {words}. The tables are rows and tasks.")
        answer: pa.Table = database.sql(sql).to_arrow_table()
    return answer


@contextmanager
def database_of(contents: Contents, *, has_tasks: bool) -> Iterator[Any]:
    """DuckDB with the views ``rows`` and ``records``, and ``tasks`` if it is needed, as that reads every record.

    Arrow reads the files, because DuckDB's own readers do not know every store.

    Raises:
        InputError: DuckDB refuses what is asked of it.
        ResultError: a file cannot be read.
    """
    try:
        import duckdb
    except ImportError as error:
        raise MissingExtraError("rankscope query", "duckdb", "sweep") from error
    closed = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    try:
        with duckdb.connect(":memory:", config=closed) as database:
            schema = rows_schema()
            parts = []
            for number, (names, wanted) in enumerate(contents.parts):
                database.register(f"part_{number}", _dataset(contents, names, schema))
                where = ""
                if wanted is not None:
                    database.register(f"wanted_{number}", pa.table({"task": pa.array(sorted(wanted), pa.string())}))
                    where = f" WHERE task IN (SELECT task FROM wanted_{number})"
                parts.append(f"SELECT * FROM part_{number}{where}")
            database.execute(f"CREATE VIEW parts AS {' UNION ALL '.join(parts)}")
            # A task without rows has one that says so, without a metric.
            database.execute(f"CREATE VIEW rows AS SELECT * EXCLUDE {RECORD} FROM parts WHERE metric IS NOT NULL")
            # Somebody may have edited a record; one that is not JSON says nothing.
            record = f"CASE WHEN json_valid({RECORD}) THEN {RECORD} END AS {RECORD}"
            database.execute(f"CREATE VIEW records AS SELECT task, {record} FROM parts WHERE {RECORD} IS NOT NULL")
            if has_tasks:
                database.register("plan", contents.tasks)
                failed = list(contents.failures.values())
                database.register("failed", pa.Table.from_pylist(failed, schema=FAILURE_COLUMNS))
                database.execute(TASKS)
            yield database
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        if not isinstance(error, duckdb.Error) or "stream registered as" in str(error) or "arrow_scan" in str(error):
            words = str(error).strip().splitlines()[-1][:500]
            raise ResultError(f"The rows in {contents.results.place} cannot be read: {words}") from error
        raise InputError(f"The query was refused: {' '.join(str(error).split())}") from error


def _dataset(contents: Contents, names: list[str], schema: pa.Schema) -> ds.Dataset:
    """Files of rows as one data set, which reads only the columns that are asked for."""
    place = contents.results.place
    dictionaries = [column.name for column in schema if pa.types.is_dictionary(column.type)]
    form = ds.ParquetFileFormat(
        read_options=ds.ParquetReadOptions(dictionary_columns=dictionaries),
        default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True),
    )
    paths = [f"{place.root}/{ROWS}/{name}.parquet" for name in names]
    return ds.dataset(paths, schema=schema, format=form, filesystem=place.arrow)


def rows_schema() -> pa.Schema:
    """The columns of ``rows``: those that name a task, and those of every verb; null where a verb lacks one."""
    from rankscope.verbs._spec import VERBS

    fixed = {name: pa.string() if pa.types.is_dictionary(kind) else kind for name, kind in FIXED_COLUMNS.items()}
    own = {name: getattr(pa, kind)() for verb in VERBS.values() for name, kind in verb.columns.items()}
    columns = {**own, **COORDINATES, **fixed}
    order = [*COORDINATES, *fixed, *(name for name in own if name not in COORDINATES)]
    names = pa.dictionary(pa.int32(), pa.string())
    return pa.schema({**{name: names if name in NAMES else columns[name] for name in order}, RECORD: pa.string()})
