"""Packs: the results of many tasks of a sweep in two large Parquet files instead of two small files per task.

::

    FOLDER/packs/NAME.rows.parquet     rows sorted by metric, site and layer, with the number of each row in its task
    FOLDER/packs/NAME.tasks.parquet    one row per task: what lists show, and its record as text
    FOLDER/packs/NAME.json             manifest: sizes and hashes of both, and the packs it replaces; written last

A pack counts once its manifest exists. From then on its tasks are read from it, and their own files and the packs that
it replaces are ignored; :mod:`rankscope.ext.sweeps.compacting` deletes them afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rankscope._files import read_regular, sha256_of
from rankscope.errors import ResultError
from rankscope.runs.plain_json import parse_sealed
from rankscope.runs.storage import refuse_large

PACKS = "packs"
NAME = re.compile(r"[0-9a-f]{16}")
SCHEMA = 1
ROW = "row"
LARGEST_MANIFEST = 16 * 2**20
NAMES = ("metric", "site", "stack", "status", "variant", "model", "checkpoint", "task", "verb", "model_key")
"""Columns of names, which are read as dictionaries: most rows repeat a few."""

SUMMARY = pa.schema({
    "key": pa.string(), "verdict": pa.string(), "inputs": pa.string(), "seconds": pa.float64(), "rows": pa.int64(),
    "bytes": pa.int64(), "parameters": pa.int64(), "weights_dtype": pa.string(), "asked_bytes": pa.int64(),
    "peak_bytes": pa.int64(), "finished": pa.string(),
})  # fmt: skip
"""What lists show about a finished task."""

RECORD = "record"
PARTS = ("rows", "tasks")


def summary_of(key: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of :data:`SUMMARY` in the record of a finished task; what another version did not store is None."""
    parts = ({"key": key}, record, record.get("table"), record.get("provenance"))
    sources = [part for part in parts if isinstance(part, Mapping)]
    summary = {name: next((s[name] for s in sources if name in s), None) for name in SUMMARY.names}
    return {name: _typed(value, SUMMARY.field(name).type) for name, value in summary.items()}


def _typed(value: Any, kind: pa.DataType) -> Any:
    """A value of a record, which may be edited, if it has the expected type."""
    if isinstance(value, bool) or value is None:
        return None
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else None
    if pa.types.is_floating(kind):
        return float(value) if isinstance(value, (int, float)) else None
    return value if isinstance(value, int) and abs(value) < 2**63 else None


@dataclass(frozen=True)
class Pack:
    """A pack with a manifest.

    Args:
        folder: the folder of packs.
        name: of this pack.
        replaces: names of the packs whose tasks it also holds.
        rows: number of its rows.
        files: size and hash of its two files.
    """

    folder: Path
    name: str
    replaces: tuple[str, ...]
    rows: int
    files: Mapping[str, Mapping[str, Any]] = field(repr=False)
    _checked: set[str] = field(default_factory=set, repr=False, compare=False)

    @property
    def manifest(self) -> Path:
        """Path of its manifest."""
        return self.folder / f"{self.name}.json"

    @property
    def rows_file(self) -> Path:
        """Path of its rows."""
        return self.folder / f"{self.name}.rows.parquet"

    @property
    def tasks_file(self) -> Path:
        """Path of its tasks."""
        return self.folder / f"{self.name}.tasks.parquet"

    @cached_property
    def keys(self) -> frozenset[str]:
        """Keys of its tasks."""
        return frozenset(self._read(["key"])["key"].to_pylist())

    def summaries(self) -> pa.Table:
        """One row of :data:`SUMMARY` per task."""
        return self._read(SUMMARY.names).cast(SUMMARY)

    @cached_property
    def records(self) -> Mapping[str, str]:
        """The record of each task, as text."""
        columns = self._read(["key", RECORD])
        return dict(zip(columns["key"].to_pylist(), columns[RECORD].to_pylist(), strict=True))

    def tables(self, columns: list[str]) -> dict[str, pa.Table]:
        """The rows of each task, in the order in which the task wrote them."""
        wanted = ["task", ROW, *(name for name in columns if name != "task")]
        self.check("rows")
        try:
            source = pq.ParquetFile(self.rows_file, read_dictionary=[name for name in wanted if name in NAMES])
            refuse_large(source.metadata, self.rows_file)
            wanted = [name for name in wanted if name in source.schema_arrow.names]
            table = source.read(columns=wanted)
        except (pa.ArrowException, OSError) as error:
            raise ResultError(f"{self.rows_file} cannot be read ({error}).") from error
        order = pa.table({"task": table["task"].cast(pa.string()), ROW: table[ROW]})
        indices = pc.sort_indices(order, sort_keys=[("task", "ascending"), (ROW, "ascending")])
        table = table.unify_dictionaries().combine_chunks().take(indices)
        tables: dict[str, pa.Table] = {}
        runs = pc.run_end_encode(order["task"].combine_chunks().take(indices))
        start = 0
        for key, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
            tables[key] = table.slice(start, end - start).select([name for name in columns if name in wanted])
            start = end
        return tables

    def check(self, part: str) -> None:
        """Compare the hash of one of its two files with the manifest, once.

        Raises:
            ResultError: the file cannot be read, or was changed after it was written.
        """
        if part in self._checked:
            return
        path = self.rows_file if part == "rows" else self.tasks_file
        try:
            same = sha256_of(path) == self.files[part]["sha256"]
        except OSError as error:
            raise ResultError(f"{path} cannot be read ({error.strerror}), though its manifest is there.") from error
        if not same:
            raise ResultError(
                f"{path} was changed after it was written: its hash differs. Restore it from a copy, or remove the "
                f"files of this name from {PACKS}/ and run the sweep again."
            )
        self._checked.add(part)

    def _read(self, columns: list[str]) -> pa.Table:
        self.check("tasks")
        try:
            source = pq.ParquetFile(self.tasks_file)
            refuse_large(source.metadata, self.tasks_file)
            return source.read(columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise ResultError(f"{self.tasks_file} cannot be read ({error}).") from error


def manifests_in(home: Path) -> frozenset[str]:
    """Names of the packs that have a manifest."""
    return frozenset(path.stem for path in (home / PACKS).glob("*.json") if NAME.fullmatch(path.stem))


def packs_in(home: Path) -> tuple[Pack, ...]:
    """The packs of a folder that no other replaces, by name.

    List the tasks' own files before: a file that compaction deletes in between is then found in its pack.

    Raises:
        ResultError: a manifest was not written by rankscope, or a file it names has another size.
    """
    folder = home / PACKS
    packs = [pack for name in sorted(manifests_in(home)) if (pack := _pack(folder, folder / f"{name}.json"))]
    replaced = {name for pack in packs for name in pack.replaces}
    current = tuple(pack for pack in packs if pack.name not in replaced)
    for pack in current:
        _check_sizes(pack)
    return current


def _pack(folder: Path, manifest: Path) -> Pack | None:
    """The pack of a manifest; None if it was deleted meanwhile, after another one had replaced it."""
    try:
        facts = parse_sealed(read_regular(manifest, LARGEST_MANIFEST))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ResultError(f"{manifest} cannot be read ({error}). Restore it from a copy.") from error
    try:
        if facts["schema"] != SCHEMA or not all(NAME.fullmatch(name) for name in facts["replaces"]):
            raise ValueError("unknown schema")
        rows = int(facts["rows"]["rows"])
        files = {part: {"bytes": int(facts[part]["bytes"]), "sha256": str(facts[part]["sha256"])} for part in PARTS}
    except (KeyError, TypeError, ValueError) as error:
        raise ResultError(f"{manifest} is not a manifest of schema {SCHEMA} ({error}).") from error
    return Pack(folder, manifest.stem, tuple(facts["replaces"]), rows, files)


def _check_sizes(pack: Pack) -> None:
    for part, path in (("rows", pack.rows_file), ("tasks", pack.tasks_file)):
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ResultError(f"{path} cannot be read ({error.strerror}), though its manifest is there.") from error
        if size != pack.files[part]["bytes"]:
            raise ResultError(f"{path} has {size} bytes; its manifest says {pack.files[part]['bytes']}.")
