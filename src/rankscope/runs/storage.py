"""Stores a run as Parquet (the rows) and ``run.json``; a reader never sees a partly written run."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rankscope._foreign_text import visible
from rankscope.errors import ResultError
from rankscope.runs.places import Place, place_of
from rankscope.runs.plain_json import parse_sealed, sealed_json
from rankscope.runs.provenance import SCHEMA
from rankscope.runs.rows import FIXED_COLUMNS, NAMES, STATUSES

SIDECAR = "run.json"
ROWS_NAME = re.compile(r"rows-[0-9a-f]{12}\.parquet")
LARGEST_SIDECAR = 16 * 2**20
LARGEST_ROWS_FILE = 4 * 2**30
LARGEST_TABLE = 20_000_000
"""Rows of one table that are decoded: a few bytes of Parquet can stand for any number, and each takes about 90 bytes in
a report. A run of 100 layers, 64 heads, 100 sequences and 30 metrics has 19 million."""
MANY_ROWS = 1_000_000
"""Rows above which a file must have a byte for each: measured values take about eight."""
LARGEST_DECODED = 4 * 2**30
MOST_LOOKS = 100


def write_run(folder: str | os.PathLike[str], facts: Mapping[str, Any], table: pa.Table) -> Path | str:
    """Write the rows, then the sidecar with their name and hash; replacing the sidecar commits the run.

    A run already in the folder stays intact until then; its rows are removed afterwards.

    Returns:
        The path of the folder, or the address.

    Raises:
        ResultError: the folder cannot be created or written to; its previous contents are unchanged.
    """
    home = place_of(folder, "folder", "a folder for the run")
    try:
        home.make()
    except OSError as error:
        raise ResultError(f"{home} cannot be made a folder ({error.strerror}). Give --out a folder.") from error
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content = sink.getvalue().to_pybytes()
    if table.num_rows > most_rows(len(content)):
        raise ResultError(
            f"The run has {table.num_rows:,} rows, and at most {most_rows(len(content)):,} in {len(content):,} bytes "
            "can be read again. Choose fewer metrics or sequences."
        )
    try:
        _write(home, facts, content, table)
    except OSError as error:
        raise ResultError(
            f"The run could not be written to {home} ({error.strerror}). An existing run there is unchanged. Free "
            "some space, or give --out another folder."
        ) from error
    return Path(home.name) if home.is_local else home.name


def _write(home: Place, facts: Mapping[str, Any], content: bytes, table: pa.Table) -> None:
    digest = hashlib.sha256(content).hexdigest()
    # Every save has a name of its own: it never overwrites, and no other process removes, what a sidecar names.
    name = f"rows-{secrets.token_hex(6)}.parquet"
    before = _named_rows(home)
    home.write(name, content)
    entry = {"file": name, "sha256": digest, "rows": table.num_rows, "columns": table.column_names}
    home.write(SIDECAR, sealed_json({**facts, "table": entry}, indent=1))
    # Only now does no sidecar name the old rows. A process killed before this line leaves an unused file.
    if before is not None:
        home.remove(before)


def read_run(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], pa.Table]:
    """Read and check a folder or address written by :func:`write_run`; the files are not trusted.

    Raises:
        ResultError: a file is missing, of another schema, modified since it was written, or malformed.
    """
    home = place_of(folder, "run", "a run, or the folder it was saved in")
    facts = _read_sidecar(home)
    # A failure counts only if the sidecar did not change meanwhile; otherwise the rows belong to a newer run.
    for _ in range(MOST_LOOKS):
        try:
            return _with_rows(home, dict(facts))
        except ResultError:
            now = _read_sidecar(home)
            if now == facts:
                raise
            facts = now  # another process replaced the run in the meantime
    raise ResultError(f"The run in {home} was replaced {MOST_LOOKS} times while it was read. Read it again later.")


def _with_rows(home: Place, facts: dict[str, Any]) -> tuple[dict[str, Any], pa.Table]:
    entry = facts.pop("table", None)
    name = entry.get("file") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(name, str) or not ROWS_NAME.fullmatch(name):
        raise ResultError(f"{home}/{SIDECAR} does not name its rows; it was not written by rankscope, or was edited.")
    content = _read_bytes(home, name, LARGEST_ROWS_FILE)
    if hashlib.sha256(content).hexdigest() != entry.get("sha256"):
        raise ResultError(f"{home}/{name} is not the file that {SIDECAR} was written for: its hash differs. Run again.")
    table = _read_rows(content, f"{home}/{name}")
    if table.num_rows != entry.get("rows") or table.column_names != entry.get("columns"):
        raise ResultError(f"{home}/{name} does not have the rows and columns that {SIDECAR} lists.")
    return facts, table


def _read_sidecar(home: Place) -> dict[str, Any]:
    path = f"{home}/{SIDECAR}"
    try:
        facts = parse_sealed(home.read(SIDECAR, LARGEST_SIDECAR))
    except FileNotFoundError as error:
        raise ResultError(
            f"There is no run in {home}: {SIDECAR} is missing. Give a folder or address written with save or --out."
        ) from error
    except OSError as error:
        raise ResultError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise ResultError(f"{path} cannot be read: {error}. Run again, or restore it from a copy.") from error
    if facts.get("schema") != SCHEMA:
        raise ResultError(
            f"{path} has schema {facts.get('schema')!r}; this rankscope reads schema {SCHEMA}. "
            "Read it with the version that wrote it, or run again."
        )
    return facts


def _read_rows(content: bytes, path: str) -> pa.Table:
    try:
        source = pq.ParquetFile(pa.BufferReader(content))
        refuse_large(source.metadata, len(content), path)
        table = source.read()
        table.validate(full=True)  # a dictionary index out of range would read out of bounds
        table = _as_written(table, path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path} is not a Parquet file that can be read ({error}).") from error
    statuses = set(table["status"].unique().to_pylist())
    if not statuses <= set(STATUSES):
        odd = sorted(repr(status) for status in statuses - set(STATUSES))
        raise ResultError(f"{path} holds statuses unknown to rankscope: {', '.join(odd)}.")
    return table


def refuse_large(facts: pq.FileMetaData, size: int, path: object) -> None:
    """Refuse a Parquet file, by its metadata and before anything is decoded, that would take much memory.

    Args:
        facts: the metadata.
        size: bytes of the file.
        path: its name, for the message.

    Raises:
        ResultError: it has too many rows or bytes.
    """
    decoded = sum(facts.row_group(number).total_byte_size for number in range(facts.num_row_groups))
    if facts.num_rows > most_rows(size) or decoded > LARGEST_DECODED:
        raise ResultError(
            f"{path} claims {facts.num_rows:,} rows and {decoded:,} bytes when decoded; of a file of {size:,} bytes, "
            f"at most {most_rows(size):,} rows and {LARGEST_DECODED:,} bytes are read."
        )


def most_rows(size: int) -> int:
    """How many rows of a file with this many bytes are decoded."""
    return min(LARGEST_TABLE, max(MANY_ROWS, size))


def _as_written(table: pa.Table, path: str) -> pa.Table:
    """The table with unified dictionaries; unexpected column types are refused."""
    missing = [name for name in FIXED_COLUMNS if name not in table.column_names]
    if missing or len(set(table.column_names)) != len(table.column_names):
        raise ResultError(f"{path} lacks the columns {', '.join(missing) or 'that it names twice'}.")
    for column in table.schema:
        expected = FIXED_COLUMNS.get(column.name)
        fits = column.type == expected if expected is not None else column.type in (NAMES, pa.int64())
        if not fits:
            raise ResultError(
                f"{path}: column {column.name!r} is {column.type}, expected {expected or 'names or int64'}."
            )
    for required in ("metric", "site", "layer", "sequence", "value", "status"):
        if table[required].null_count:
            raise ResultError(f"{path}: column {required!r} has empty cells.")
    return _visible_names(table.replace_schema_metadata(None).unify_dictionaries())


def _visible_names(table: pa.Table) -> pa.Table:
    """The table with visible text in its columns of names; see :func:`rankscope.runs.plain_json.parse_sealed`."""
    for place, column in enumerate(table.columns):
        if not pa.types.is_dictionary(column.type) or not column.num_chunks:
            continue
        names = column.chunk(0).dictionary.to_pylist()
        if all(name is None or name.isprintable() for name in names):
            continue
        shown = pa.array([None if name is None else visible(name) for name in names], pa.string())
        chunks = [pa.DictionaryArray.from_arrays(chunk.indices, shown) for chunk in column.chunks]
        table = table.set_column(place, table.schema.field(place), pa.chunked_array(chunks, type=column.type))
    return table


def _named_rows(home: Place) -> str | None:
    """File name of the rows that the folder's current sidecar points to, if rankscope wrote it."""
    try:
        name = _read_sidecar(home).get("table", {}).get("file")
    except (ResultError, AttributeError):
        return None
    return name if isinstance(name, str) and ROWS_NAME.fullmatch(name) else None


def _read_bytes(home: Place, name: str, limit: int) -> bytes:
    try:
        return home.read(name, limit)
    except OSError as error:
        raise ResultError(f"{home}/{name} cannot be read ({error.strerror}).") from error
