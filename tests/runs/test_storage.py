"""Files are not trusted, and half a run is never seen."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankscope.errors import ResultError
from rankscope.runs import storage
from rankscope.runs.run import load_run
from tests.runs.builders import make_run, profile, write_sealed


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return make_run(profile({"relative_residual": [0.9, 0.5]}).table()).save(tmp_path / "run")


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "run.json"
    facts = json.loads(path.read_text())
    change(facts)
    write_sealed(path, facts)


def put_rows(folder: Path, table: pa.Table) -> None:
    """Replace the rows by others, with a sidecar that agrees."""
    entry = json.loads((folder / "run.json").read_text())["table"]
    pq.write_table(table, folder / entry["file"])
    digest = hashlib.sha256((folder / entry["file"]).read_bytes()).hexdigest()
    new = {"file": entry["file"], "sha256": digest, "rows": table.num_rows, "columns": table.column_names}
    edit(folder, lambda facts: facts.update(table=new))


def test_two_files_and_nothing_else(saved: Path) -> None:
    names = sorted(path.name for path in saved.iterdir())
    assert len(names) == 2
    assert names[1] == "run.json"
    assert storage.ROWS_NAME.fullmatch(names[0])


def test_the_sidecar_holds_no_bare_nan(saved: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    json.loads((saved / "run.json").read_text(), parse_constant=refuse)


def test_saving_again_replaces_the_run(saved: Path) -> None:
    other = make_run(profile({"relative_residual": [0.1]}).table())
    other.save(saved)
    assert load_run(saved).to_json() == other.to_json()
    assert len(list(saved.iterdir())) == 2
    other.save(saved)
    assert load_run(saved).to_json() == other.to_json()


@pytest.mark.parametrize("dies_at", [1, 2])
def test_a_crash_leaves_the_old_run_whole(saved: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int) -> None:
    before = load_run(saved).to_json()
    real, calls = os.replace, []

    def replace(source: str, target: Path) -> None:
        calls.append(target)
        if len(calls) == dies_at:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        make_run(profile({"relative_residual": [0.1]}).table()).save(saved)
    assert load_run(saved).to_json() == before
    assert not [path for path in saved.iterdir() if path.name.startswith(".")]


def test_rows_changed_on_disk_are_noticed(saved: Path) -> None:
    rows = next(saved.glob("*.parquet"))
    rows.write_bytes(rows.read_bytes()[:-1] + b"x")
    with pytest.raises(ResultError, match="hash differs"):
        load_run(saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.update(schema=99), "schema 99"),
        (lambda f: f.pop("schema"), "schema None"),
        (lambda f: f.pop("table"), "does not name its rows"),
        (lambda f: f["table"].update(file="../../etc/passwd"), "does not name its rows"),
        (lambda f: f["table"].update(file=7), "does not name its rows"),
        (lambda f: f["table"].update(file="rows-000000000000.parquet"), "cannot be read"),
        (lambda f: f["table"].update(rows=1), "does not have the rows"),
        (lambda f: f.update(kind=1), "'kind'"),
        (lambda f: f.update(evidence={}), "'evidence'"),
        (lambda f: f.update(floor=[]), "'floor'"),
        (lambda f: f.pop("null"), "'null'"),
        (lambda f: f.update(provenance={}), "Provenance"),
    ],
)
def test_an_edited_sidecar_is_refused(saved: Path, change: Callable[[dict[str, Any]], None], words: str) -> None:
    edit(saved, change)
    with pytest.raises(ResultError, match=words):
        load_run(saved)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", "[" * 100_000])
def test_a_sidecar_that_is_not_an_object_is_refused(saved: Path, text: str) -> None:
    (saved / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(ResultError):
        load_run(saved)


def test_a_huge_sidecar_is_not_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LARGEST_SIDECAR", 10)
    with pytest.raises(ResultError, match="more than 10 bytes"):
        load_run(saved)


def test_rows_of_other_types_are_refused(saved: Path) -> None:
    table = load_run(saved).table
    bad = {
        "is int32, expected double|expected double": table.set_column(
            6, "value", pa.array(np.ones(table.num_rows, "int32"))
        ),
        "lacks the columns status": table.drop_columns(["status"]),
        "unknown to rankscope": table.set_column(7, "status", pa.array(["fine"] * table.num_rows).dictionary_encode()),
        "empty cells": table.set_column(3, "layer", pa.array([None] * table.num_rows, pa.int32())),
        "'odd'": table.append_column("odd", pa.array([[1]] * table.num_rows)),
    }
    for words, rows in bad.items():
        put_rows(saved, rows)
        with pytest.raises(ResultError, match=words):
            load_run(saved)
    put_rows(saved, table)
    assert load_run(saved).table.num_rows == table.num_rows


def test_a_file_that_is_not_parquet_is_refused(saved: Path) -> None:
    rows = next(saved.glob("*.parquet"))
    rows.write_bytes(b"PAR1 not really PAR1")
    edit(saved, lambda facts: facts["table"].update(sha256=hashlib.sha256(rows.read_bytes()).hexdigest()))
    with pytest.raises(ResultError, match="not a Parquet file"):
        load_run(saved)


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="There is no run"):
        load_run(tmp_path)


def test_out_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match="cannot be made a folder"):
        make_run(profile({"m": [0.1]}).table()).save(tmp_path / "file")
