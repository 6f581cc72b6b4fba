"""The folder of a sweep: one Parquet file and one record per task, named by the task's key and written atomically.

Compaction moves many of them into a few large files; see :mod:`rankscope.ext.sweeps.packs`.

::

    FOLDER/expected.jsonl                                  the tasks of the plan, one JSON object per line
    FOLDER/rows/verb=measure/model_key=NAME-HASH/KEY.parquet
    FOLDER/tasks/KEY.json                                  record of a finished task; written after its rows
    FOLDER/failures/KEY.json                               why a task failed; removed when it succeeds

A task that runs twice leaves one file. A rows file without a record is not part of the data set.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from rankscope._files import open_regular, read_regular, sha256_of
from rankscope.errors import RankscopeError, ResultError
from rankscope.ext.sweeps.packs import Pack, manifests_in, packs_in, summary_of
from rankscope.runs.plain_json import parse_json, parse_sealed, sealed_json, unsealed, visible
from rankscope.runs.storage import replace_file

EXPECTED = "expected.jsonl"
ROWS, TASKS, FAILURES = "rows", "tasks", "failures"
SCHEMA = 1
KEY = re.compile(r"[0-9a-f]{24}")
LARGEST_RECORD = 4 * 2**20
MOST_LOOKS = 100
T = TypeVar("T")
_SWEEP_AGAIN = "Remove the record of the task (the same name in tasks/) and run the sweep again."
_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Expected:
    """One task of the plan, as stored in the folder.

    Attributes:
        key: hash of everything its rows depend on.
        task: its description in plain JSON types.
    """

    key: str
    task: Mapping[str, Any]

    @property
    def rows_file(self) -> str:
        """Path of its rows, relative to the folder."""
        return rows_file(str(self.task.get("verb")), str(self.task.get("model")), self.key)


@dataclass(frozen=True)
class SweepFolder:
    """A folder written by a sweep.

    Args:
        home: the folder.

    Example:
        >>> SweepFolder(Path("families")).record_file("0" * 24).as_posix()
        'families/tasks/000000000000000000000000.json'
    """

    home: Path

    def record_file(self, key: str) -> Path:
        """Path of the record of a finished task."""
        return self.home / TASKS / f"{key}.json"

    def failure_file(self, key: str) -> Path:
        """Path of the record of a failed task."""
        return self.home / FAILURES / f"{key}.json"

    def begin(self, expected: Iterable[Expected]) -> None:
        """Create the folder and store the list of tasks."""
        try:
            for name in (ROWS, TASKS, FAILURES):
                (self.home / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResultError(
                f"{self.home} cannot be made a folder ({error.strerror}). Give --out a folder."
            ) from error
        lines = (sealed_json({"key": one.key, "task": dict(one.task)}) for one in expected)
        replace_file(self.home / EXPECTED, b"\n".join(lines) + b"\n")

    def expected(self) -> list[Expected]:
        """The tasks of the plan that was last run in this folder.

        Raises:
            ResultError: no sweep was started here, or the list was not written by rankscope.
        """
        path = self.home / EXPECTED
        if not path.exists():
            raise ResultError(f"There is no sweep in {self.home}: {EXPECTED} is missing. Give the folder of a sweep.")
        return list(_expected_in(path))

    def contents(self) -> Contents:
        """What the folder holds now."""
        failures = _keys_in(self.home / FAILURES)
        # In this order: a file that compaction deletes in between is found in its pack.
        loose = _keys_in(self.home / TASKS)
        packs = packs_in(self.home)
        packed = frozenset[str]().union(*(pack.keys for pack in packs))
        return Contents(self, frozenset(loose - packed), frozenset(failures - loose - packed), packs)

    def read(self, reading: Callable[[Contents], T]) -> T:
        """Apply a function to the contents, again if compaction replaced files while it read them.

        Raises:
            ResultError: a file cannot be read, or says what no sweep writes, though its checksum is right.
        """
        for _ in range(MOST_LOOKS):
            before = manifests_in(self.home)
            try:
                return reading(self.contents())
            except (RankscopeError, OSError):
                if manifests_in(self.home) == before:
                    raise
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                raise ResultError(
                    f"A record in {self.home} is not one that a sweep writes ({type(error).__name__}: {error!s:.100})."
                ) from error
        raise ResultError(f"{self.home} changed {MOST_LOOKS} times while it was read. Read it again later.")

    def failure(self, key: str) -> dict[str, Any]:
        """Why a task failed."""
        return _read_object(self.failure_file(key))

    def keep_rows(self, one: Expected, table: pa.Table, facts: Mapping[str, Any]) -> None:
        """Write the rows of a finished task, then its record; each is written atomically."""
        target = self.home / one.rows_file
        target.parent.mkdir(parents=True, exist_ok=True)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        content = sink.getvalue().to_pybytes()
        # Rows first: a task counts as done once its record exists, so a kill in between only means a rerun.
        replace_file(target, content)
        entry = {
            "file": one.rows_file,
            "sha256": hashlib.sha256(content).hexdigest(),
            "rows": table.num_rows,
            "bytes": len(content),
            "columns": table.column_names,
        }
        self._write(self.record_file(one.key), one, {**facts, "table": entry})
        self.failure_file(one.key).unlink(missing_ok=True)

    def keep_failure(self, one: Expected, facts: Mapping[str, Any]) -> None:
        """Store why a task failed."""
        self._write(self.failure_file(one.key), one, facts)

    def _write(self, path: Path, one: Expected, facts: Mapping[str, Any]) -> None:
        record = {"schema": SCHEMA, "key": one.key, "task": dict(one.task), **facts}
        replace_file(path, sealed_json(record, indent=1))


@dataclass(frozen=True)
class Contents:
    """The finished and failed tasks of a folder at one moment, including those of earlier plans.

    Args:
        folder: the folder.
        loose: keys of the finished tasks with files of their own.
        failed: keys of the failed tasks that did not succeed later.
        packs: the others.
    """

    folder: SweepFolder
    loose: frozenset[str]
    failed: frozenset[str]
    packs: tuple[Pack, ...]

    @cached_property
    def done(self) -> frozenset[str]:
        """Keys of the finished tasks."""
        return self.loose.union(*(pack.keys for pack in self.packs))

    def record(self, key: str) -> dict[str, Any]:
        """The record of a finished task."""
        if key in self.loose:
            return _read_object(self.folder.record_file(key))
        pack = next(pack for pack in self.packs if key in pack.keys)
        return record_in(pack.records[key].encode("utf-8"), pack.tasks_file)

    def checked_rows(self, one: Expected) -> Path:
        """Path of the rows of a task with files of its own, after their hash was compared with its record.

        Raises:
            ResultError: they are gone, or not the rows that the record was written for.
        """
        path, record = self.folder.home / one.rows_file, self.folder.record_file(one.key)
        try:
            # Nothing of the record is shown, so it is not made safe to show: a query over many tasks reads all of them.
            wanted = parse_json(unsealed(read_regular(record, LARGEST_RECORD)))["table"]["sha256"]
        except OSError as error:
            raise ResultError(f"{record} cannot be read ({error.strerror}).") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ResultError(f"{record} cannot be read: {error}. Remove it, and run the sweep again.") from error
        try:
            same = sha256_of(path) == wanted
        except FileNotFoundError as error:
            raise ResultError(f"{path} is gone, though its task is done. {_SWEEP_AGAIN}") from error
        except OSError as error:
            raise ResultError(f"{path} cannot be read ({error.strerror}). {_SWEEP_AGAIN}") from error
        if not same:
            raise ResultError(f"{path} was changed after it was written: its hash differs. {_SWEEP_AGAIN}")
        return path

    def summaries(self, keys: Collection[str]) -> dict[str, dict[str, Any]]:
        """What lists show about the finished tasks among ``keys``; reads the records of loose tasks only."""
        summaries = {key: summary_of(key, self.record(key)) for key in keys if key in self.loose}
        for pack in self.packs:
            summaries |= {row["key"]: row for row in pack.summaries().to_pylist() if row["key"] in keys}
        return summaries


def rows_file(verb: str, model: str, key: str) -> str:
    """Path of a task's rows, relative to the folder; safe for any model name.

    Example:
        >>> rows_file("measure", "../a b", "0" * 24)
        'rows/verb=measure/model_key=.._a_b-2c2c791a/000000000000000000000000.parquet'
    """
    model = visible(model)  # as every reader of the task has it
    short = _NAME.sub("_", model)[-40:]
    digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{ROWS}/verb={_NAME.sub('_', verb)}/model_key={short}-{digest}/{key}.parquet"


def _expected_in(path: Path) -> Iterator[Expected]:
    try:
        with open_regular(path) as stream:
            lines = iter(lambda: stream.readline(LARGEST_RECORD), b"")
            yield from _tasks_in(lines, path)
    except OSError as error:
        raise ResultError(f"{path} cannot be read ({error.strerror}).") from error


def _tasks_in(lines: Iterator[bytes], path: Path) -> Iterator[Expected]:
    for position, line in enumerate(lines, 1):
        try:
            entry = parse_sealed(line.removesuffix(b"\n"))
            one = Expected(entry["key"], entry["task"])
        except (ValueError, KeyError) as error:
            raise ResultError(
                f"{path}, line {position} does not describe a task ({error}). Start the sweep again: finished tasks "
                "are kept."
            ) from error
        if not (isinstance(one.key, str) and KEY.fullmatch(one.key) and isinstance(one.task, dict)):
            raise ResultError(f"{path}, line {position} does not describe a task; it was not written by rankscope.")
        yield one


def _keys_in(folder: Path) -> set[str]:
    if not folder.is_dir():
        return set()
    names = (entry.name.removesuffix(".json") for entry in os.scandir(folder) if entry.name.endswith(".json"))
    return {name for name in names if KEY.fullmatch(name)}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        text = read_regular(path, LARGEST_RECORD)
    except OSError as error:
        raise ResultError(f"{path} cannot be read ({error.strerror}).") from error
    return record_in(text, path)


def record_in(text: bytes, path: Path) -> dict[str, Any]:
    """The record in the content of a file.

    Raises:
        ResultError: it was not written by rankscope.
    """
    try:
        record = parse_sealed(text)
    except ValueError as error:
        raise ResultError(f"{path} cannot be read: {error}. Remove it, and run the sweep again.") from error
    if record.get("schema") != SCHEMA or not isinstance(record.get("task"), dict):
        raise ResultError(f"{path} is not a record of schema {SCHEMA}. Run the sweep again in another folder.")
    return record
