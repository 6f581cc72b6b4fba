"""Rows of a result, collected column by column: one row per metric, site, layer, (head) and sequence."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope._types import Status
from rankscope.errors import InputError, ResultError, UnknownNameError

STATUSES: tuple[str, ...] = tuple(str(status) for status in Status)
STATUS_CODE: Mapping[Status, int] = {status: code for code, status in enumerate(Status)}
NAMES = pa.dictionary(pa.int32(), pa.string())

FIXED_COLUMNS: Mapping[str, pa.DataType] = {
    "metric": NAMES,
    "site": NAMES,
    "stack": NAMES,
    "layer": pa.int32(),
    "head": pa.int32(),
    "sequence": pa.int64(),
    "value": pa.float64(),
    "status": NAMES,
}

MOST_LISTED = 12
"""Values named in an error message."""

AXES = ("metric", "site", "layer", "head", "sequence")
"""Fixed columns that identify a row, in addition to the stack."""

BETWEEN_INPUTS = "inputs."
"""Sites whose values compare the inputs of a run, not the tokens of one sequence; their rows have sequence 0."""

ENTRY = "_in"
"""Ending of such a site where the values are those of the stream as it enters the first block."""

_REMARKS = b"remarks"
_PIECES = pa.schema(
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


def only(table: pa.Table, **wanted: str | int | None) -> pa.Table:
    """Rows whose columns have these values; None matches an empty cell.

    Example:
        >>> table = pa.table({"stack": ["encoder", None], "layer": [0, 1]})
        >>> only(table, stack="encoder").num_rows, only(table, stack=None)["layer"].to_pylist()
        (1, [1])
    """
    for column, value in wanted.items():
        match = pc.is_null(table[column]) if value is None else pc.fill_null(pc.equal(table[column], value), False)
        table = table.filter(match)
    return table


def own_columns(table: pa.Table) -> list[str]:
    """The additional columns of a verb that have values here; with the fixed ones they identify a row."""
    return [
        name for name in table.column_names if name not in FIXED_COLUMNS and table[name].null_count < table.num_rows
    ]


def coordinates_of(table: pa.Table) -> list[str]:
    """Columns whose values must never be averaged over: the stack, and what the verb adds, such as ``variant``."""
    numbers = {*AXES, "value", "status"}
    return [name for name in table.column_names if name not in numbers]


def chosen(table: pa.Table, **wanted: Any) -> pa.Table:
    """Rows with these coordinates; a list matches each of its values, None an empty cell.

    Raises:
        UnknownNameError: the table has no such column, or no row that matches so far has the value.

    Example:
        >>> table = pa.table({"variant": ["pure", "full", "+mlp"], "layer": [0, 1, 2]})
        >>> chosen(table, variant=["pure", "full"])["layer"].to_pylist()
        [0, 1]
    """
    for column, asked in wanted.items():
        if column not in (known := [*AXES, *coordinates_of(table)]):
            raise UnknownNameError("coordinate of this run", column, known)
        held = table[column].unique().to_pylist()
        several = list(asked) if isinstance(asked, (list, tuple, set, frozenset)) else [asked]
        for value in several:
            if value not in held:
                raise UnknownNameError(f"{column} among these rows", str(value), [str(one) for one in held])
        kept = [pc.is_null(table[column]) if v is None else pc.equal(table[column], v) for v in several]
        table = table.filter(functools.reduce(pc.or_kleene, kept)) if kept else table.slice(0, 0)
    return table


def refuse_mixture(rows: pa.Table, named: Iterable[str] = ()) -> pa.Table:
    """The rows, if they have one value of every coordinate that is not ``named``.

    Raises:
        InputError: with the coordinate, its values and how to choose.
    """
    for column in coordinates_of(rows):
        values = rows[column].unique().to_pylist()
        if len(values) > 1 and column not in named:
            listed = ", ".join(repr(value) for value in values[:MOST_LISTED])
            more = f" and {len(values) - MOST_LISTED} more" if len(values) > MOST_LISTED else ""
            raise InputError(
                f"These rows have {len(values)} values of {column} ({listed}{more}), which do not belong into one "
                f"number. Choose one, as in {column}={values[0]!r}; all rows are in run.table."
            )
    return rows


def within_sequences(table: pa.Table) -> pa.Table:
    """Rows about single sequences, without those that compare inputs."""
    return table.filter(pc.invert(pc.starts_with(pc.cast(table["site"], pa.string()), BETWEEN_INPUTS)))


def of_stack(table: pa.Table, stack: str | None) -> pa.Table:
    """Rows of one stack; all rows for None, which stands for the only stack of a model."""
    return table if stack is None else only(table, stack=stack)


@dataclass(frozen=True)
class Piece:
    """Values of one metric at one site of one layer for consecutive sequences, as given to :meth:`RowWriter.add`."""

    metric: str
    site: str
    stack: str | None
    layer: int
    first_sequence: int
    values: NDArray[np.float64]
    statuses: NDArray[np.int8]
    coordinates: tuple[str | int | None, ...]


@dataclass
class RowWriter:
    """Collects reduced values and builds one table at the end; keeps one small object per call of :meth:`add`.

    Args:
        coordinates: names of the verb's additional columns, such as ``("variant", "mask")``.

    Example:
        >>> writer = RowWriter()
        >>> writer.add(
        ...     metric="mean_cosine",
        ...     site="block.out",
        ...     stack=None,
        ...     layer=0,
        ...     first_sequence=0,
        ...     values=np.array([0.1, 0.2]),
        ...     statuses=np.array([0, 0]),
        ...     head_axis=False,
        ... )
        >>> writer.table().num_rows
        2
    """

    coordinates: Sequence[str] = ()
    _pieces: list[Piece] = field(default_factory=list, repr=False)
    _later: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        taken = sorted(set(self.coordinates) & {*FIXED_COLUMNS})
        if taken or len(set(self.coordinates)) != len(self.coordinates):
            raise ResultError(
                f"An additional column needs a unique name: got {list(self.coordinates)!r}, "
                f"while {[*FIXED_COLUMNS]!r} are taken. Rename it."
            )

    def add(
        self,
        *,
        metric: str,
        site: str,
        stack: str | None,
        layer: int,
        first_sequence: int,
        values: NDArray[np.floating],
        statuses: NDArray[np.integer],
        head_axis: bool,
        at: Mapping[str, str | int | None] | None = None,
    ) -> None:
        """Add the values of one metric at one site of one layer, for consecutive sequences.

        Args:
            metric: registered name of the metric.
            site: name of the site.
            stack: ``"encoder"`` or ``"decoder"`` in a model that has both, else None.
            layer: number of the block, from 0.
            first_sequence: number of the sequence the first value belongs to.
            values: shape ``(sequences,)``, or ``(sequences, heads)`` with ``head_axis``.
            statuses: codes into ``list(Status)``, same shape.
            head_axis: whether the last axis runs over heads.
            at: values of the additional columns; missing ones are null.
        """
        self.settle()
        numbers = np.array(values, dtype=np.float64)
        codes = np.array(statuses, dtype=np.int8)
        expected = 2 if head_axis else 1
        if numbers.ndim != expected or codes.shape != numbers.shape:
            axes = "(sequences, heads)" if head_axis else "(sequences,)"
            raise ResultError(
                f"{metric} at {site}, layer {layer}: values of shape {numbers.shape} and statuses of shape "
                f"{codes.shape}; both must have the shape {axes}."
            )
        if codes.size and not (codes.min() >= 0 and codes.max() < len(STATUSES)):
            raise ResultError(f"{metric} at {site}, layer {layer}: a status code is not in 0..{len(STATUSES) - 1}.")
        # Minus infinity is a valid logarithm: that of an exact zero.
        known = np.isfinite(numbers) | (np.isneginf(numbers) & metric.startswith("log"))
        codes[(codes == STATUS_CODE[Status.OK]) & ~known] = STATUS_CODE[Status.NOT_FINITE]
        unknown = sorted(set(at or {}) - set(self.coordinates))
        if unknown:
            raise ResultError(f"{unknown!r} were not announced: give RowWriter(coordinates=...) their names first.")
        further = tuple((at or {}).get(name) for name in self.coordinates)
        self._pieces.append(Piece(metric, site, stack, layer, first_sequence, numbers, codes, further))

    def add_later(self, deliver: Callable[[], None]) -> None:
        """Have ``deliver`` called, which adds values still on a device, before rows are next added or read."""
        self._later.append(deliver)

    def settle(self) -> None:
        """Add what :meth:`add_later` announced."""
        later, self._later = self._later, []
        for deliver in later:
            deliver()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The added values, one piece per call of :meth:`add`."""
        self.settle()
        return tuple(self._pieces)

    def replace(self, pieces: Iterable[Piece]) -> None:
        """Replace everything added so far with these pieces."""
        pieces = list(pieces)
        self.settle()
        self._pieces = pieces

    def table(self) -> pa.Table:
        """Everything added so far as one table."""
        pieces = self.pieces
        # A piece is one value per column and many rows: its labels are repeated as often as it has values.
        sizes = np.array([piece.values.size for piece in pieces], dtype=np.int64)
        status_codes = _joined([piece.statuses.ravel() for piece in pieces], np.int8)
        columns: dict[str, pa.Array] = {
            "metric": _names([piece.metric for piece in pieces], sizes),
            "site": _names([piece.site for piece in pieces], sizes),
            "stack": _names([piece.stack for piece in pieces], sizes),
            "layer": pa.array(np.repeat(np.array([piece.layer for piece in pieces], dtype=np.int32), sizes)),
            "head": _heads(pieces),
            "sequence": pa.array(_joined([_sequences(piece) for piece in pieces], np.int64)),
            "value": pa.array(_joined([piece.values.ravel() for piece in pieces], np.float64)),
            "status": pa.DictionaryArray.from_arrays(pa.array(status_codes.astype(np.int32)), pa.array(STATUSES)),
        }
        for position, name in enumerate(self.coordinates):
            columns[name] = _coordinate([piece.coordinates[position] for piece in pieces], sizes)
        return pa.table(columns)


def _joined(parts: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype=dtype)


def _sequences(piece: Piece) -> NDArray[np.int64]:
    # Must match ``values.ravel()``: sequences vary slowly, heads fast. :func:`_heads` is the counterpart.
    count = piece.values.shape[0]
    numbers = np.arange(piece.first_sequence, piece.first_sequence + count, dtype=np.int64)
    return np.repeat(numbers, piece.values.shape[1]) if piece.values.ndim == 2 else numbers


def _heads(pieces: Sequence[Piece]) -> pa.Array:
    parts, absent = [], []
    for piece in pieces:
        if piece.values.ndim == 2:
            parts.append(np.tile(np.arange(piece.values.shape[1], dtype=np.int32), piece.values.shape[0]))
        else:
            parts.append(np.zeros(piece.values.size, dtype=np.int32))
        absent.append(np.full(piece.values.size, piece.values.ndim == 1))
    return pa.array(_joined(parts, np.int32), mask=_joined(absent, np.bool_))


def _names(labels: Sequence[str | None], sizes: NDArray[np.int64]) -> pa.DictionaryArray:
    known = list(dict.fromkeys(label for label in labels if label is not None))
    code = {label: number for number, label in enumerate(known)}
    codes = np.array([code[label] if label is not None else 0 for label in labels], dtype=np.int32)
    absent = np.array([label is None for label in labels], dtype=np.bool_)
    # The code 0 of an absent label is a placeholder; the mask makes the cell null.
    indices = pa.array(np.repeat(codes, sizes), mask=np.repeat(absent, sizes))
    return pa.DictionaryArray.from_arrays(indices, pa.array(known, type=pa.string()))


def _coordinate(labels: list[str | int | None], sizes: NDArray[np.int64]) -> pa.Array:
    # A column is integer only if every label given is; a single name makes all of them names.
    given = [label for label in labels if label is not None]
    if given and all(isinstance(label, int) for label in given):
        numbers = np.array([label if isinstance(label, int) else 0 for label in labels], dtype=np.int64)
        absent = np.array([label is None for label in labels], dtype=np.bool_)
        return pa.array(np.repeat(numbers, sizes), mask=np.repeat(absent, sizes))
    return _names([None if label is None else str(label) for label in labels], sizes)


def rows_to_bytes(pieces: Iterable[Piece], remarks: Mapping[str, Any]) -> bytes:
    """Serialise pieces of a table, and JSON remarks about them, as one Arrow stream.

    Example:
        >>> piece = Piece("mean_cosine", "block.out", None, 0, 4, np.array([0.1]), np.array([0], dtype=np.int8), ())
        >>> found, remarks = rows_from_bytes(rows_to_bytes([piece], {"rank": 1}))
        >>> found[0].first_sequence, found[0].values.tolist(), remarks
        (4, [0.1], {'rank': 1})
    """
    rows = [_piece_facts(piece) for piece in pieces]
    schema = _PIECES.with_metadata({_REMARKS: json.dumps(dict(remarks)).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_table(pa.Table.from_pylist(rows, schema=schema))
    content: bytes = sink.getvalue().to_pybytes()
    return content


def rows_from_bytes(data: bytes) -> tuple[list[Piece], dict[str, Any]]:
    """Inverse of :func:`rows_to_bytes`.

    Raises:
        ResultError: the bytes were not written by it.
    """
    try:
        table = pa.ipc.open_stream(data).read_all()
        remarks = json.loads(table.schema.metadata[_REMARKS])
        return [_piece_from(row) for row in table.to_pylist()], remarks
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise ResultError(f"Another process sent {len(data)} bytes that are not rows: {error}.") from error


def _piece_facts(piece: Piece) -> dict[str, Any]:
    return {
        "metric": piece.metric,
        "site": piece.site,
        "stack": piece.stack,
        "layer": piece.layer,
        "first_sequence": piece.first_sequence,
        "sequences": piece.values.shape[0],
        "heads": piece.values.shape[1] if piece.values.ndim == 2 else None,
        # Raw little-endian bytes: exact for every NaN and infinity, and independent of the machine.
        "values": piece.values.astype("<f8", copy=False).tobytes(),
        "statuses": piece.statuses.astype(np.int8, copy=False).tobytes(),
        "coordinates": json.dumps(piece.coordinates),
    }


def _piece_from(row: Mapping[str, Any]) -> Piece:
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
