"""The rows of a run as one line per value and one column per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope.runs.curves import USABLE
from rankscope.runs.rows import FIXED_COLUMNS, only

ALWAYS = ("metric", "site", "stack", "layer")


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """Usable values by key and sequence; heads averaged, NaN where there is none.

    Args:
        columns: names of the parts of a key: metric, site, stack, layer, then the verb's own columns.
        keys: in the order of the rows.
        sequences: numbers of the sequences, ascending.
        values: shape ``(keys, sequences)``.
    """

    columns: tuple[str, ...]
    keys: tuple[tuple[Any, ...], ...]
    sequences: tuple[int, ...]
    values: NDArray[np.float64]

    @property
    def position(self) -> dict[tuple[Any, ...], int]:
        """Row of each key."""
        return {key: row for row, key in enumerate(self.keys)}


def by_sequence(table: pa.Table, *, metrics: Sequence[str] | None = None, site: str | None = None) -> SequenceTable:
    """Gather the usable values of a table; see :class:`SequenceTable`."""
    if metrics is not None:
        table = table.filter(pc.is_in(pc.cast(table["metric"], pa.string()), value_set=pa.array(list(metrics))))
    if site is not None:
        table = only(table, site=site)
    own = [name for name in table.column_names if name not in FIXED_COLUMNS and table[name].null_count < table.num_rows]
    columns = (*ALWAYS, *own)
    parts = [table[name].to_pylist() for name in columns]
    position: dict[tuple[Any, ...], int] = {}
    row = np.array([position.setdefault(key, len(position)) for key in zip(*parts, strict=True)], dtype=np.int64)
    sequences, column = np.unique(table["sequence"].to_numpy(), return_inverse=True)
    listed = pc.is_in(pc.cast(table["status"], pa.string()), value_set=pa.array(USABLE)).to_numpy().astype(np.bool_)
    value = table["value"].to_numpy()
    usable = listed & np.isfinite(value)
    shape = (len(position), sequences.size)
    total, count = np.zeros(shape), np.zeros(shape)
    np.add.at(total, (row[usable], column[usable]), value[usable])
    np.add.at(count, (row[usable], column[usable]), 1.0)
    values = np.divide(total, count, out=np.full(shape, np.nan), where=count > 0)
    return SequenceTable(columns, tuple(position), tuple(int(number) for number in sequences), values)
