"""SQL over a sweep: right answers, and a stranger's SQL can reach nothing else."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

import rankscope as rs
from rankscope.errors import InputError, ResultError
from tests.ext.sweeps.folders import made, rows, task

COURSE = {"relative_residual": [0.9, 0.8, 0.7], "mu": [1.0, 2.0, 3.0]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    one, two = task(1), task(2, model="two", seed=5, variant="pure")
    three = task(3, verb="ablate", variant=None)
    tables = [
        (one, rows(one, COURSE)),
        (two, rows(two, COURSE)),
        (three, rows(three, COURSE, variant="pure", mask="own")),
    ]
    made(tmp_path / "sweep", tables, {"broken": "no weights"}, missing=1)
    return tmp_path / "sweep"


def test_rows_of_all_verbs_with_nulls_where_a_column_is_not_theirs(folder: Path) -> None:
    sql = (
        "SELECT verb, variant, mask, model, count(*) AS n, avg(value) AS mean FROM rows "
        "WHERE metric = 'mu' GROUP BY ALL ORDER BY ALL"
    )
    assert rs.query(folder, sql).to_pylist() == [
        {"verb": "ablate", "variant": "pure", "mask": "own", "model": "one", "n": 6, "mean": pytest.approx(2.005)},
        {"verb": "measure", "variant": "full", "mask": None, "model": "one", "n": 6, "mean": pytest.approx(2.005)},
        {"verb": "measure", "variant": "pure", "mask": None, "model": "two", "n": 6, "mean": pytest.approx(2.005)},
    ]


def test_tasks_join_with_rows(folder: Path) -> None:
    sql = (
        "SELECT state, count(*) AS n, sum(rows) AS rows, max(reason) AS reason FROM tasks GROUP BY state ORDER BY state"
    )
    assert rs.query(folder, sql).to_pylist() == [
        {"state": "done", "n": 3, "rows": 36, "reason": None},
        {"state": "failed", "n": 1, "rows": None, "reason": "no weights"},
        {"state": "missing", "n": 1, "rows": None, "reason": None},
    ]
    joined = "SELECT count(*) AS n FROM rows JOIN tasks USING (task) WHERE tasks.parameters = 1000"
    assert rs.query(folder, joined).to_pylist() == [{"n": 36}]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('{secret}')",
        "SELECT * FROM read_text('{secret}')",
        "SELECT * FROM '{secret}'",
        "SELECT * FROM read_parquet('{folder}/rows/**/*.parquet')",
        "SELECT * FROM read_json('{folder}/sweep.json')",
        "SELECT * FROM glob('{folder}/*')",
        "SELECT * FROM sniff_csv('{secret}')",
        "SELECT * FROM secret_table",
        "SELECT * FROM read_csv('https://example.org/x.csv')",
        "COPY rows TO '{folder}/stolen.csv'",
        "COPY (SELECT 1) TO '{secret}'",
        "EXPORT DATABASE '{folder}/dump'",
        "ATTACH '{folder}/new.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET lock_configuration = false",
        "PRAGMA enable_external_access = true",
        "CREATE TABLE t AS SELECT 1",
        "DROP VIEW rows",
        "CALL pragma_version()",
        "SELECT 1; COPY rows TO '{folder}/stolen.csv'",
        "SELECT 1; SELECT 2",
        "SELECT getenv('HOME')",
        "SELECT content FROM read_text('.tmp/secret.csv')",
        "SELECT * FROM glob('.tmp/*')",
        "SELECT * FROM '.tmp/secret.csv'",
        "EXPLAIN ANALYZE COPY (SELECT 1 AS x) TO '.tmp/stolen.csv'",
        "EXPLAIN ANALYZE COPY (SELECT 1 AS x, 2 AS y) TO '.tmp/d' (FORMAT csv, PARTITION_BY (y))",
        "EXPLAIN ANALYZE ATTACH '.tmp/new.db'",
        "EXPLAIN SELECT 1",
        "SET temp_directory = '{folder}'",
        "",
        ";",
    ],
)
def test_a_strangers_sql_reaches_nothing_else(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    import pyarrow as pa

    secret_table = pa.table({"x": [1]})  # a variable of the caller must not be reachable by its name
    secret = tmp_path / "secret.csv"
    secret.write_text("a,b\n1,2\n")
    # DuckDB allows its temporary directory, .tmp in the current folder, whatever that leads to.
    monkeypatch.chdir(folder)
    (folder / ".tmp").symlink_to(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(InputError):
        rs.query(folder, sql.format(secret=secret, folder=folder))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert secret_table.num_rows == 1


def test_a_long_query_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="characters"):
        rs.query(folder, "SELECT 1 -- " + "x" * 200_000)


def test_an_empty_sweep_has_empty_tables(tmp_path: Path) -> None:
    made(tmp_path, [], missing=2)
    assert rs.query(tmp_path, "SELECT count(*) AS n FROM rows").to_pylist() == [{"n": 0}]
    assert rs.query(tmp_path, "SELECT count(*) AS n FROM tasks").to_pylist() == [{"n": 2}]


def test_rows_that_are_gone_belong_to_a_task_that_is_missing(folder: Path) -> None:
    next((folder / "rows").iterdir()).unlink()
    counted = rs.query(folder, "SELECT count(DISTINCT task) AS n FROM rows").to_pylist()
    missing = rs.query(folder, "SELECT count(*) AS n FROM tasks WHERE state = 'missing'").to_pylist()
    assert (counted, missing) == ([{"n": 2}], [{"n": 2}])


def test_a_file_of_rows_that_is_no_parquet(folder: Path) -> None:
    next((folder / "rows").iterdir()).write_bytes(b"PAR1 no")
    with pytest.raises(ResultError, match="cannot be read"):
        rs.query(folder, "SELECT sum(value) FROM rows")


def test_a_page_that_was_changed_is_noticed(folder: Path) -> None:
    """Parquet's own checksums; the system that stores the file has others."""
    path = next((folder / "rows").iterdir())
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ResultError, match="cannot be read"):
        rs.query(folder, "SELECT * FROM rows")
