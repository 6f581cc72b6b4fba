"""Collected rows as bytes and back, bit for bit: how they travel from one process to another."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from rankscope._errors import ResultError
from rankscope.runs.rows import Piece

_REMARKS = b"remarks"
_SCHEMA = pa.schema(
    {
        "metric": pa.string(),
        "site": pa.string(),
        "stack": pa.string(),
        "layer": pa.int32(),
        "first_sequence": pa.int64(),
        "sequences": pa.int64(),
        "heads": pa.int64(),
        "values": pa.binary(),
        "statuses": pa.binary(),
        "coordinates": pa.string(),
    }
)


def packed(pieces: Iterable[Piece], remarks: Mapping[str, Any]) -> bytes:
    """Pieces of a table, and JSON remarks that go with them, as one Arrow stream.

    Example:
        >>> piece = Piece("mean_cosine", "block.out", None, 0, 4, np.array([0.1]), np.array([0], dtype=np.int8), ())
        >>> found, remarks = unpacked(packed([piece], {"rank": 1}))
        >>> found[0].first_sequence, found[0].values.tolist(), remarks
        (4, [0.1], {'rank': 1})
    """
    rows = [_row(piece) for piece in pieces]
    schema = _SCHEMA.with_metadata({_REMARKS: json.dumps(dict(remarks)).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_table(pa.Table.from_pylist(rows, schema=schema))
    found: bytes = sink.getvalue().to_pybytes()
    return found


def unpacked(data: bytes) -> tuple[list[Piece], dict[str, Any]]:
    """What :func:`packed` was given.

    Raises:
        ResultError: when these bytes are nothing that it wrote.
    """
    try:
        table = pa.ipc.open_stream(data).read_all()
        remarks = json.loads(table.schema.metadata[_REMARKS])
        return [_piece(row) for row in table.to_pylist()], remarks
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise ResultError(f"Another process sent {len(data)} bytes that are no rows: {error}.") from error


def _row(piece: Piece) -> dict[str, Any]:
    return {
        "metric": piece.metric,
        "site": piece.site,
        "stack": piece.stack,
        "layer": piece.layer,
        "first_sequence": piece.first_sequence,
        "sequences": piece.values.shape[0],
        "heads": piece.values.shape[1] if piece.values.ndim == 2 else None,
        "values": piece.values.astype("<f8", copy=False).tobytes(),
        "statuses": piece.statuses.astype(np.int8, copy=False).tobytes(),
        "coordinates": json.dumps(piece.coordinates),
    }


def _piece(row: Mapping[str, Any]) -> Piece:
    shape = (row["sequences"],) if row["heads"] is None else (row["sequences"], row["heads"])
    return Piece(
        metric=row["metric"],
        site=row["site"],
        stack=row["stack"],
        layer=row["layer"],
        first_sequence=row["first_sequence"],
        values=np.frombuffer(row["values"], dtype="<f8").reshape(shape),
        statuses=np.frombuffer(row["statuses"], dtype=np.int8).reshape(shape),
        coordinates=tuple(json.loads(row["coordinates"])),
    )
