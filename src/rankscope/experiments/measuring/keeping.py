"""Parts of a long experiment that have every column of a result, kept between runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rankscope._types import Status
from rankscope.experiments.training.keeping import Row, kept
from rankscope.results.rows import STATUS_CODE, RowWriter


def written(
    writer: RowWriter, folder: Path | None, name: str, facts: Mapping[str, Any], make: Callable[[RowWriter], None]
) -> None:
    """Write the rows of one part: those kept in ``folder`` under the same facts, else those that ``make`` writes.

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

    for row in kept(folder, name, facts, rows):
        _write(writer, row)


def _write(writer: RowWriter, row: Row) -> None:
    writer.add(
        metric=row["metric"],
        site=row["site"],
        stack=row.get("stack"),
        layer=row["layer"],
        first_sequence=row["sequence"],
        values=np.array([row["value"]], dtype=np.float64),
        statuses=np.array([STATUS_CODE[Status(row["status"])]]),
        head_axis=False,
        at={name: row[name] for name in writer.coordinates if name in row},
    )
