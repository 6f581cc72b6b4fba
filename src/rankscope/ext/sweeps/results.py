"""What a sweep keeps in its folder, or at its address.

::

    sweep.json              how many tasks share a file; created once, by whoever comes first
    tasks.parquet           the tasks of the plan that was started last
    rows/NAME.parquet       the rows of the finished tasks of one chunk
    failures/NAME.parquet   the tasks of a chunk that failed, and why

A chunk is a few tasks that are neighbours in the plan. The name of its file is the hash of the keys of its tasks, so a
chunk that runs twice overwrites its own file with equal rows, and one listing of names shows what is finished. A file
is written in one step, by the process that computed it: nothing is locked, and no other process has to know.

The facts about a task (verdict, provenance, cost) are JSON in the column ``record``, filled in its first row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rankscope.errors import InputError, ResultError
from rankscope.ext.sweeps.tasks import COORDINATES, KEY_LENGTH, Task
from rankscope.runs.places import Place, place_of
from rankscope.runs.plain_json import parse_json
from rankscope.runs.storage import refuse_large

SWEEP, TASKS, ROWS, FAILURES = "sweep.json", "tasks.parquet", "rows", "failures"
SCHEMA = 2
MOST_FILES = 10_000
"""By default, chunks are so long that a plan has no more files: a listing takes ten requests, a query a minute."""
READERS = 16
LARGEST_FILE = 2**31
EXPECTED = "the folder of a sweep, or its address"
TASK_COLUMNS = pa.schema({**COORDINATES, "chunk": pa.string(), "description": pa.string()})
FAILURE_COLUMNS = pa.schema({
    "task": pa.string(), "reason": pa.string(), "type": pa.string(), "trace": pa.string(), "seconds": pa.float64(),
    "finished": pa.string(),
})  # fmt: skip


class StoringError(ResultError):
    """Results cannot be stored, so that running more tasks would be in vain."""


@dataclass(frozen=True)
class Chunk:
    """Tasks whose rows are one file."""

    tasks: tuple[Task, ...]

    @cached_property
    def name(self) -> str:
        """Hash of the keys of its tasks."""
        return hashlib.sha256("".join(task.key for task in self.tasks).encode()).hexdigest()[:KEY_LENGTH]


def chunks_of(tasks: Sequence[Task], size: int) -> list[Chunk]:
    """Neighbours in groups of ``size``."""
    return [Chunk(tuple(tasks[start : start + size])) for start in range(0, len(tasks), size)]


@dataclass(frozen=True)
class Results:
    """The place where a sweep keeps its results."""

    place: Place

    @classmethod
    def at(cls, given: object) -> Results:
        """The results in a folder or at an address."""
        return cls(place_of(given, "folder", EXPECTED))

    def begin(self, tasks: Sequence[Task], chunk: int | None) -> list[Chunk]:
        """Cut the tasks into chunks and store what they are; the chunk length of the first start applies.

        Raises:
            InputError: another chunk length was asked for.
            ResultError: nothing can be written there.
        """
        size = chunk or max(1, -(-len(tasks) // MOST_FILES))
        facts = json.dumps({"schema": SCHEMA, "chunk": size}).encode()
        try:
            self.place.make(ROWS, FAILURES)
            if self.place.holds(SWEEP) or not self.place.create(SWEEP, facts):
                size = self._chunk_length()
            if chunk is not None and chunk != size:
                raise InputError(
                    f"{self.place} was begun with chunks of {size} tasks, and its files are named by them. Leave out "
                    "--chunk, or give another --out."
                )
            chunks = chunks_of(tasks, size)
            self.place.write(TASKS, _parquet(_listed(chunks)))
        except OSError as error:
            where = "cannot be made a folder" if self.place.is_local else "cannot be written to"
            raise ResultError(f"{self.place} {where} ({error.strerror}). Give --out a place of yours.") from error
        return chunks

    def _chunk_length(self) -> int:
        try:
            facts = parse_json(self.place.read(SWEEP, 10_000))
            if facts["schema"] == SCHEMA and isinstance(facts["chunk"], int) and facts["chunk"] > 0:
                return int(facts["chunk"])
        except (ValueError, LookupError, TypeError):
            pass
        raise ResultError(f"{self.place}/{SWEEP} was not written by this version of rankscope. Give another --out.")

    def waiting(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks that are left.

        One listing shows it, unless tasks are spread over other files: those of a plan that was since extended, or of a
        chunk in which some tasks failed. These files are opened for their keys, and what is left is cut anew.
        """
        rows, failed = self.listed(ROWS), self.listed(FAILURES)
        left = [chunk for chunk in chunks if chunk.name not in rows or chunk.name in failed]
        partly = rows - ({chunk.name for chunk in chunks} - failed)
        if not left or not partly:
            return left
        finished = frozenset[str]().union(*self.keys_in(partly).values())
        whole = [chunk for chunk in left if not any(task.key in finished for task in chunk.tasks)]
        begun = [chunk for chunk in left if any(task.key in finished for task in chunk.tasks)]
        rest = [task for chunk in begun for task in chunk.tasks if task.key not in finished]
        return [*whole, *chunks_of(rest, len(chunks[0].tasks))]

    def listed(self, folder: str) -> set[str]:
        """The names of the files in a folder.

        Raises:
            ResultError: the place cannot be read.
        """
        try:
            return {name[:-8] for name in self.place.names(folder) if name.endswith(".parquet")}
        except OSError as error:
            raise ResultError(f"{self.place} cannot be read ({error.strerror}).") from error

    def keys_in(self, names: Iterable[str]) -> dict[str, frozenset[str]]:
        """The keys of the tasks in files of rows; many files are read at once."""
        names = sorted(names)
        with ThreadPoolExecutor(READERS) as pool:
            tables = pool.map(lambda name: self.table(f"{ROWS}/{name}.parquet", ["task"]), names)
            return {name: frozenset(one["task"].unique().to_pylist()) for name, one in zip(names, tables, strict=True)}

    def table(self, path: str, columns: list[str] | None = None) -> pa.Table:
        """The content of a file.

        Raises:
            ResultError: it cannot be read, or is not one that a sweep writes.
        """
        try:
            if self.place.is_local:  # not a pipe, and not a device
                source = pa.BufferReader(self.place.read(path, LARGEST_FILE))
            else:
                source = self.place.arrow.open_input_file(f"{self.place.root}/{path}")
            file = pq.ParquetFile(source, page_checksum_verification=True)
            refuse_large(file.metadata, source.size(), f"{self.place}/{path}")
            return file.read(columns=columns)
        except OSError as error:  # Arrow raises it for damaged pages, without strerror
            raise ResultError(f"{self.place}/{path} cannot be read ({error.strerror or error}).") from error
        except (pa.ArrowException, KeyError, ValueError) as error:
            words = f"{self.place}/{path} is not a file of a sweep ({error}). Remove it and sweep again."
            raise ResultError(words) from error

    def keep(self, name: str, tables: Sequence[pa.Table], failures: Sequence[Mapping[str, Any]]) -> None:
        """Write what came of a chunk: the tasks that failed, then the rows of the others, which is the commit.

        Raises:
            StoringError: a file could not be written.
        """
        try:
            if failures:
                table = pa.Table.from_pylist(list(failures), FAILURE_COLUMNS)
                self.place.write(f"{FAILURES}/{name}.parquet", _parquet(table))
            if tables:
                table = pa.concat_tables(tables, promote_options="default")
                self.place.write(f"{ROWS}/{name}.parquet", _parquet(table))
        except OSError as error:
            raise StoringError(
                f"Results could not be written to {self.place} ({error.strerror}). Stored results are complete. "
                "Free the space or mend the access, and start the sweep again."
            ) from error

    def contents(self) -> Contents:
        """What is there now.

        Raises:
            ResultError: no sweep was started there, or it cannot be read.
        """
        try:
            if not self.place.holds(SWEEP):
                raise ResultError(f"There is no sweep in {self.place}: {SWEEP} is missing. Give {EXPECTED}.")
        except OSError as error:
            raise ResultError(f"{self.place} cannot be read ({error.strerror}).") from error
        tasks = self.table(TASKS)
        if not tasks.schema.equals(TASK_COLUMNS):
            raise ResultError(f"{self.place}/{TASKS} was not written by this version of rankscope.")
        return Contents(self, tasks, frozenset(self.listed(ROWS)), frozenset(self.listed(FAILURES)))


@dataclass(frozen=True)
class Contents:
    """What a sweep holds at one moment.

    Args:
        results: the place.
        tasks: the tasks of the plan.
        files: names of the files of rows.
        failed_files: names of the files of failures.
    """

    results: Results
    tasks: pa.Table
    files: frozenset[str]
    failed_files: frozenset[str]

    @cached_property
    def complete(self) -> frozenset[str]:
        """The chunks of the plan whose tasks are all done, known from their names."""
        return (self.files & frozenset(self.tasks["chunk"].unique().to_pylist())) - self.failed_files

    @cached_property
    def others(self) -> dict[str, frozenset[str]]:
        """The keys in each of the other files."""
        return self.results.keys_in(self.files - self.complete)

    @cached_property
    def planned(self) -> frozenset[str]:
        """The keys of the plan."""
        return frozenset(self.tasks["task"].to_pylist())

    @cached_property
    def in_complete(self) -> frozenset[str]:
        """The keys of the tasks in complete chunks."""
        pairs = zip(self.tasks["task"].to_pylist(), self.tasks["chunk"].to_pylist(), strict=True)
        return frozenset(key for key, chunk in pairs if chunk in self.complete)

    @cached_property
    def done(self) -> frozenset[str]:
        """The keys of the finished tasks of the plan."""
        return self.in_complete.union(*(keys & self.planned for keys in self.others.values()))

    @cached_property
    def earlier(self) -> int:
        """How many finished tasks are not part of the plan."""
        return len(frozenset[str]().union(*self.others.values()) - self.planned)

    @cached_property
    def failures(self) -> dict[str, dict[str, Any]]:
        """Facts about the tasks of the plan that failed and did not succeed later, by key."""
        paths = [f"{FAILURES}/{name}.parquet" for name in sorted(self.failed_files)]
        with ThreadPoolExecutor(READERS) as pool:
            rows = [row for table in pool.map(self.results.table, paths) for row in table.to_pylist()]
        last = {row.get("task"): row for row in sorted(rows, key=lambda row: str(row.get("finished")))}
        return {key: last[key] for key in self.tasks["task"].to_pylist() if key in last and key not in self.done}

    @cached_property
    def parts(self) -> list[tuple[list[str], frozenset[str] | None]]:
        """Files to read, and the tasks of theirs that count: all (None), or some. Each task is in one part only."""
        taken = set(self.in_complete)
        of_plan: list[str] = []
        twice: list[tuple[list[str], frozenset[str] | None]] = []
        for name, keys in self.others.items():
            wanted = keys & self.planned
            if taken.isdisjoint(wanted):
                of_plan.append(name)
            elif wanted - taken:  # two processes with different plans did the same tasks at the same time
                twice.append(([name], wanted - taken))
            taken |= wanted
        return [(sorted(self.complete), None), (of_plan, self.planned), *twice]


def _listed(chunks: Sequence[Chunk]) -> pa.Table:
    """The tasks of a plan as a table."""
    columns: dict[str, list[Any]] = {name: [] for name in TASK_COLUMNS.names}
    for chunk in chunks:
        for task in chunk.tasks:
            for name in COORDINATES:
                columns[name].append(task.key if name == "task" else task.facts.get(name))
            columns["chunk"].append(chunk.name)
            columns["description"].append(json.dumps(task.facts, ensure_ascii=True))
    return pa.table(columns, TASK_COLUMNS)


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    content: bytes = sink.getvalue().to_pybytes()
    return content
