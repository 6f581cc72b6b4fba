"""Results of one piece of work kept in a file, so that a long reproduction goes on where it was interrupted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rankscope._types import Status
from rankscope.runs.rows import FIXED_COLUMNS, STATUS_CODE, RowWriter
from rankscope.runs.storage import replace_file

Row = dict[str, Any]
"""``metric``, ``layer`` and ``value``; other columns where they say something; and a recipe's own coordinates."""


def kept(folder: Path | None, name: str, facts: Mapping[str, Any], make: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a piece of work: read if they were kept under the same facts, else made, and kept.

    Args:
        folder: where pieces are kept; None keeps nothing.
        name: of the piece, a file name without suffix.
        facts: everything the rows depend on, in JSON types; a file with other facts is made again.
        make: does the work.
    """
    if folder is None:
        return make()
    path = folder / f"{name}.json"
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()
    found = _read(path)
    if found.get("digest") == digest and isinstance(found.get("rows"), list):
        kept_rows: list[Row] = found["rows"]
        return kept_rows
    rows = make()
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps({"digest": digest, "facts": dict(facts), "rows": rows}).encode("utf-8"))
    return rows


def _read(path: Path) -> dict[str, Any]:
    """What was kept; nothing where it cannot be read, so that it is made again."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def written(
    writer: RowWriter, folder: Path | None, name: str, facts: Mapping[str, Any], make: Callable[[RowWriter], None]
) -> None:
    """Write the rows of one part that have every column: kept ones under the same facts, else those ``make`` writes.

    Args:
        writer: of the whole experiment.
        folder: of all parts; None to keep none.
        name: of the part.
        facts: everything that decides its rows, in plain JSON types.
        make: writes them into a writer of its own.
    """

    def rows() -> list[Row]:
        own = RowWriter(coordinates=writer.coordinates)
        make(own)
        return [{key: value for key, value in row.items() if value is not None} for row in own.table().to_pylist()]

    write_rows(writer, kept(folder, name, facts, rows))


def write_rows(writer: RowWriter, rows: Iterable[Row], site: str | None = None) -> None:
    """Rows into a table; whatever is no fixed column is a coordinate the writer must know.

    Args:
        writer: takes them.
        rows: with a status where it is not ``ok``.
        site: of all of them; None where each names its own.
    """
    for row in rows:
        writer.add(
            metric=row["metric"],
            site=row["site"] if site is None else site,
            stack=row.get("stack"),
            layer=row["layer"],
            first_sequence=row.get("sequence", 0),
            values=np.array([row["value"]], dtype=np.float64),
            statuses=np.array([STATUS_CODE[Status(row.get("status", Status.OK))]]),
            head_axis=False,
            at={name: value for name, value in row.items() if name not in FIXED_COLUMNS},
        )
