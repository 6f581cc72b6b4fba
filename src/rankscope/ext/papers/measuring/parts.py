"""The skeleton of a reproduction: parts of work, each kept in a file when done, whose rows become one run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from tqdm.auto import tqdm

from rankscope._files import read_regular
from rankscope._types import Status
from rankscope.ext.papers._spec import Settings
from rankscope.runs.plain_json import parse_sealed, sealed_json
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import FIXED_COLUMNS, STATUS_CODE, RowWriter
from rankscope.runs.run import Run
from rankscope.runs.storage import replace_file

LARGEST_PART = 2**30
Coordinates = Mapping[str, str | int | None]
Row = dict[str, Any]
"""``metric``, ``site``, ``layer`` and ``value``; other fixed columns if they are not null; and coordinates."""


@dataclass(frozen=True)
class RowRecorder:
    """Records values under fixed coordinates.

    Args:
        writer: takes the rows.
        at: values of its additional columns.
    """

    writer: RowWriter
    at: Coordinates = field(default_factory=dict)

    def under(self, **at: str | int | None) -> RowRecorder:
        """The same recorder with additional coordinates."""
        return RowRecorder(self.writer, {**self.at, **at})

    def add(
        self,
        metric: str,
        values: ArrayLike,
        site: str,
        *,
        layer: int = 0,
        stack: str | None = None,
        sequence: int = 0,
        status: Status = Status.OK,
        **at: str | int | None,
    ) -> None:
        """Record one value, or those of consecutive sequences."""
        numbers = np.atleast_1d(np.asarray(values, dtype=np.float64))
        self.writer.add(
            metric=metric,
            site=site,
            stack=stack,
            layer=layer,
            first_sequence=sequence,
            values=numbers,
            statuses=np.full(numbers.shape, STATUS_CODE[status]),
            head_axis=False,
            at={**self.at, **at},
        )


@dataclass(frozen=True)
class WorkPart:
    """A part of a reproduction that can be resumed.

    Attributes:
        name: a file name without suffix that no other part has.
        facts: everything the rows depend on, in JSON types.
        make: does the work.
    """

    name: str
    facts: Mapping[str, Any]
    make: Callable[[RowRecorder], None]


def measured_parts(
    settings: Settings, coordinates: Sequence[str], parts: Sequence[WorkPart], unit: str = "network"
) -> RowWriter:
    """The rows of all parts. Parts that were saved under the same facts are not measured again."""
    writer = RowWriter(coordinates=coordinates)
    for part in tqdm(parts, desc=settings.name, unit=unit, disable=not settings.progress):

        def rows(part: WorkPart = part) -> list[Row]:
            own = RowWriter(coordinates=coordinates)
            part.make(RowRecorder(own))
            return [{key: value for key, value in row.items() if value is not None} for row in own.table().to_pylist()]

        write_rows(writer, saved_rows(settings.keep, part.name, part.facts, rows))
    return writer


def finished_run(
    settings: Settings,
    writer: RowWriter,
    provenance: Provenance,
    floor: dict[str, Any],
    *,
    notes: Iterable[str] = (),
    **extra: Any,
) -> Run:
    """The run of a reproduction; its verdict is added by :func:`rankscope.reproduce`."""
    return Run(
        kind=f"reproduce:{settings.name}",
        provenance=provenance,
        floor=floor,
        verdict="",
        table=writer.table(),
        notes=tuple(dict.fromkeys(notes)),
        extra=extra,
    )


def saved_rows(folder: Path | None, name: str, facts: Mapping[str, Any], make: Callable[[], list[Row]]) -> list[Row]:
    """Rows read from the folder if they were saved there under the same facts; otherwise computed and saved.

    Args:
        folder: folder for finished parts; None to save nothing.
        name: of the part.
        facts: everything the rows depend on; a file with other facts is replaced.
        make: does the work.
    """
    if folder is None:
        return make()
    path = folder / f"{name}.json"
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()
    saved = _read(path)
    if saved.get("digest") == digest and isinstance(saved.get("rows"), list):
        kept_rows: list[Row] = saved["rows"]
        return kept_rows
    rows = make()
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, sealed_json({"digest": digest, "facts": dict(facts), "rows": [_plain(row) for row in rows]}))
    return rows


def _plain(row: Row) -> Row:
    """The row in JSON, which has no word for a value that is not finite; :func:`float` reads the one written."""
    return row if np.isfinite(row["value"]) else {**row, "value": repr(float(row["value"]))}


def _read(path: Path) -> dict[str, Any]:
    """The saved rows; empty if they cannot be read or were changed, so that the part is measured again."""
    try:
        return parse_sealed(read_regular(path, LARGEST_PART))
    except (OSError, ValueError):
        return {}


def write_rows(writer: RowWriter, rows: Iterable[Row]) -> None:
    """Rows into a table; each column that is not a fixed one is a coordinate the writer must know."""
    for row in rows:
        at = {name: value for name, value in row.items() if name not in FIXED_COLUMNS}
        RowRecorder(writer, at).add(
            row["metric"],
            float(row["value"]),
            row["site"],
            layer=row["layer"],
            stack=row.get("stack"),
            sequence=row.get("sequence", 0),
            status=Status(row.get("status", Status.OK)),
        )
