"""The triangular factor of a tall matrix, taken chunk by chunk: its singular values are those of the matrix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

_CHUNK_IN_WIDTHS = 2
_TALL_IN_WIDTHS = 2 * _CHUNK_IN_WIDTHS


def is_tall(rows: int, columns: int) -> bool:
    """Whether going chunk by chunk saves memory that matters."""
    return rows > _TALL_IN_WIDTHS * columns


def chunks(rows: int, columns: int) -> Iterator[slice]:
    """Rows, twice as many at a time as there are columns: the factor so far then adds half to the work."""
    step = _CHUNK_IN_WIDTHS * columns
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def triangular_factor(pieces: Iterable[Float[Tensor, "rows columns"]]) -> Float[Tensor, "columns columns"]:
    """R of X = QR, where the pieces are the rows of X.

    Orthogonal transformations only, so singular values keep all the digits that those of X itself would: unlike a Gram
    matrix it squares no condition. Exact up to rounding.

    Example:
        >>> X = torch.tensor([[3.0, 0.0], [0.0, 1.0], [4.0, 0.0]], dtype=torch.float64)
        >>> [round(value, 12) for value in torch.linalg.svdvals(triangular_factor([X[:2], X[2:]])).tolist()]
        [5.0, 1.0]
    """
    factor: Tensor | None = None
    for piece in pieces:
        stacked = piece if factor is None else torch.cat([factor, piece])
        factor = torch.linalg.qr(stacked, mode="r").R
    assert factor is not None
    return factor
