"""``sweep compact``: moves the results of finished tasks from two small files each into a few large ones.

It can be killed at any time, and everything can be read while it runs. Each pack is written completely, and counts once
its manifest has been renamed into place; what it replaces is deleted only then. What an earlier compaction left behind
when it was killed is removed first.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm.auto import tqdm

from rankscope._files import read_regular
from rankscope._types import path_of
from rankscope.errors import ResultError
from rankscope.ext.sweeps.folder import LARGEST_RECORD, TASKS, Contents, Expected, SweepFolder, record_in
from rankscope.ext.sweeps.packs import PACKS, RECORD, ROW, SCHEMA, SUMMARY, Pack, manifests_in, packs_in, summary_of
from rankscope.ext.sweeps.querying import rows_schema
from rankscope.runs.locks import lock_file
from rankscope.runs.plain_json import sealed_json
from rankscope.runs.storage import LARGEST_ROWS_FILE, refuse_large, replace_file, settle

MOST_ROWS = 1_000_000
ORDER = ("metric", "site", "layer", "task", ROW)
GROUP = 1 << 17
LOCK = "lock"
_OWN = re.compile(r"\.?[0-9a-f]{16}\.")


@dataclass(frozen=True)
class Compaction:
    """What a compaction did.

    Attributes:
        tasks: tasks that no longer have files of their own.
        packs: packs in the folder afterwards.
        left: why a task kept its own files, by its key.
    """

    tasks: int
    packs: int
    left: dict[str, str]

    def __str__(self) -> str:
        words = f"{self.tasks} tasks compacted; {self.packs} pack{'' if self.packs == 1 else 's'} in the folder."
        if self.left:
            key, why = next(iter(self.left.items()))
            words += f" {len(self.left)} tasks keep their own files, the first because {why} ({key})."
        return words


@dataclass(frozen=True)
class _Result:
    """The result of one task: its record as text, what lists show of it, and its rows with the columns of a pack."""

    key: str
    record: str
    summary: Mapping[str, Any]
    table: pa.Table


def compact(folder: str | os.PathLike[str], *, rows: int = MOST_ROWS, progress: bool = False) -> Compaction:
    """Move the results of finished tasks of a sweep into large Parquet files, sorted by metric, site and layer.

    Queries, status and the atlas give the same answers before, while and after it runs. A sweep may run meanwhile.

    Args:
        folder: folder of the sweep.
        rows: largest number of rows of one pack; decides how much memory is needed, about half a GiB for the default.
        progress: show a progress bar.

    Returns:
        How many tasks were moved, and which were not because their files do not fit their record.

    Raises:
        ResultError: there is no sweep in the folder, another process compacts it, or the disk is full.

    Example:
        >>> import rankscope, tempfile
        >>> plan = {"models": ["init:tiny-bert"], "verbs": ["measure"], "inputs": {"sequences": 1, "tokens": 8}}
        >>> folder = tempfile.mkdtemp()
        >>> _ = rankscope.sweep(plan, folder, serial=True)
        >>> print(rankscope.compact(folder))
        1 tasks compacted; 1 pack in the folder.
    """
    home = SweepFolder(path_of(folder, "folder", "the folder of a sweep"))
    expected = home.expected()
    try:
        (home.home / PACKS).mkdir(exist_ok=True)
        with lock_file(home.home / PACKS / LOCK, "sweep compact") as lock:
            if not lock.take():
                raise ResultError(f"Another process compacts {home.home}.")
            _clean(home)
            return _compact(home, expected, rows, progress)
    except OSError as error:
        raise ResultError(
            f"{home.home} could not be compacted ({error.strerror}). Nothing is lost: free some space and start it "
            "again."
        ) from error


def _compact(home: SweepFolder, expected: list[Expected], rows: int, progress: bool) -> Compaction:
    contents = home.contents()
    place = {one.key: number for number, one in enumerate(expected)}
    waiting = sorted(contents.loose, key=lambda key: (place.get(key, len(place)), key), reverse=True)
    small = [pack for pack in contents.packs if pack.rows < rows // 2]
    left: dict[str, str] = {}
    schema = rows_schema()
    with tqdm(total=len(waiting), desc="compact", unit="task", disable=not progress) as bar:
        while waiting or len(small) > 1:
            batch: list[_Result] = []
            joined: list[Pack] = []
            size = 0
            # A pack is replaced as a whole by one other, so that no task is ever in two packs that count.
            while small and size + small[0].rows <= rows:
                joined.append(small.pop(0))
                batch += _unpacked(joined[-1])
                size += joined[-1].rows
            while waiting and size < rows:
                loose = _loose(contents, waiting.pop(), schema, left)
                bar.update()
                if loose is not None:
                    batch.append(loose)
                    size += loose.table.num_rows
            if len(batch) > sum(len(pack.keys) for pack in joined) or len(joined) > 1:
                _write_pack(home, batch, [pack.name for pack in joined])
                _clean(home)
    return Compaction(len(contents.loose) - len(left), len(packs_in(home.home)), left)


def _loose(contents: Contents, key: str, schema: pa.Schema, left: dict[str, str]) -> _Result | None:
    """The result of a task with files of its own; None, with the reason in ``left``, if they do not fit each other."""
    try:
        file = contents.folder.record_file(key)
        text = read_regular(file, LARGEST_RECORD)
        record = record_in(text, file)
        one = Expected(key, record["task"])
        path = contents.folder.home / one.rows_file
        content = read_regular(path, LARGEST_ROWS_FILE)
        if hashlib.sha256(content).hexdigest() != record["table"]["sha256"]:
            raise ResultError(f"the hash of {path.name} is not that of its record")
        source = pq.ParquetFile(pa.BufferReader(content))
        refuse_large(source.metadata, path)
        table = source.read()
        table.validate(full=True)
        return _Result(key, text.decode("utf-8"), summary_of(key, record), _with_names(table, one, schema))
    except (ResultError, pa.ArrowException, KeyError, TypeError, OSError, ValueError) as error:
        left[key] = str(error) or type(error).__name__
        return None


def _with_names(table: pa.Table, one: Expected, schema: pa.Schema) -> pa.Table:
    """The rows with the columns that were in the path of their file, and their numbers."""
    _, verb, model_key, _ = Path(one.rows_file).parts
    names = {"verb": verb.removeprefix("verb="), "model_key": model_key.removeprefix("model_key=")}
    for name, value in names.items():
        table = table.append_column(name, pa.repeat(pa.scalar(value, pa.string()), table.num_rows))
    table = table.append_column(ROW, pa.array(range(table.num_rows), pa.int32()))
    kinds = {field.name: field.type for field in schema}
    return table.cast(pa.schema([field.with_type(kinds.get(field.name, field.type)) for field in table.schema]))


def _unpacked(pack: Pack) -> list[_Result]:
    pack.check("rows")
    columns = [name for name in pq.read_schema(pack.rows_file).names if name not in ("task", ROW)]
    tables = pack.tables(["task", *columns, ROW])
    # Every task has a record; one without rows has no table.
    empty = next(iter(tables.values())).slice(0, 0) if tables else None
    shown = {row["key"]: row for row in pack.summaries().to_pylist()}
    return [_Result(key, text, shown[key], tables.get(key, empty)) for key, text in pack.records.items()]


def _write_pack(home: SweepFolder, batch: Sequence[_Result], replaces: Sequence[str]) -> None:
    """Write both files of a pack, then its manifest, which makes it count."""
    name = hashlib.sha256("".join(sorted(one.key for one in batch)).encode()).hexdigest()[:16]
    folder = home.home / PACKS
    rows = pa.concat_tables([_plain(one.table) for one in batch], promote_options="default").combine_chunks()
    rows = rows.sort_by([(column, "ascending") for column in ORDER])
    tasks = pa.Table.from_pylist(
        [{**one.summary, RECORD: one.record} for one in batch],
        schema=SUMMARY.append(pa.field(RECORD, pa.string())),
    )
    facts: dict[str, Any] = {"schema": SCHEMA, "replaces": list(replaces)}
    for part, table in (("rows", rows), ("tasks", tasks)):
        path = folder / f"{name}.{part}.parquet"
        digest, size = _write_table(path, table)
        facts[part] = {"sha256": digest, "bytes": size, "rows": table.num_rows}
    replace_file(folder / f"{name}.json", sealed_json(facts, indent=1))
    settle(folder)


def _plain(table: pa.Table) -> pa.Table:
    """The table without dictionaries, which differ between tasks."""
    kinds = [pa.string() if pa.types.is_dictionary(field.type) else field.type for field in table.schema]
    return table.cast(pa.schema([field.with_type(kind) for field, kind in zip(table.schema, kinds, strict=True)]))


def _write_table(path: Path, table: pa.Table) -> tuple[str, int]:
    """Write a table next to its place, flush it, rename it; its hash and size."""
    draft = path.with_name(f".{path.name}")
    pq.write_table(table, draft, compression="zstd", row_group_size=GROUP)
    digest = hashlib.sha256()
    with draft.open("rb") as stream:
        while part := stream.read(1 << 22):
            digest.update(part)
        os.fsync(stream.fileno())
        size = stream.tell()
    os.replace(draft, path)
    return digest.hexdigest(), size


def _clean(home: SweepFolder) -> None:
    """Delete what packs that count have replaced, and files of packs that were never finished."""
    folder = home.home / PACKS
    current = packs_in(home.home)
    for name in manifests_in(home.home) - {pack.name for pack in current}:
        (folder / f"{name}.json").unlink()
    known = {path for pack in current for path in (pack.rows_file, pack.tasks_file, pack.manifest)}
    for path in folder.iterdir():
        if path not in known and _OWN.match(path.name):
            path.unlink()
    there = {path.stem for path in (home.home / TASKS).glob("*.json")}
    for pack in current:
        for key in pack.keys & there:
            one = Expected(key, record_in(pack.records[key].encode("utf-8"), pack.tasks_file)["task"])
            # The record last: as long as it is there, the rows may be.
            (home.home / one.rows_file).unlink(missing_ok=True)
            home.failure_file(key).unlink(missing_ok=True)
            home.record_file(key).unlink(missing_ok=True)
