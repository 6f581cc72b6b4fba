"""The triangular (QR) factor of a tall matrix, computed chunk by chunk: it has the same singular values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

_CHUNK_IN_WIDTHS = 2
_TALL_IN_WIDTHS = 2 * _CHUNK_IN_WIDTHS


def is_tall(rows: int, columns: int) -> bool:
    """Whether working chunk by chunk saves a relevant amount of memory."""
    return rows > _TALL_IN_WIDTHS * columns


def chunks(rows: int, columns: int) -> Iterator[slice]:
    """Chunks with twice as many rows as columns, so that stacking the factor so far adds half to the work."""
    step = _CHUNK_IN_WIDTHS * columns
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def triangular_factor(pieces: Iterable[Float[Tensor, "rows columns"]]) -> Float[Tensor, "columns columns"]:
    """R of X = QR, where the pieces are the rows of X.

    Only orthogonal transformations are used, so the singular values are as accurate as those of X itself: unlike a Gram
    matrix, this does not square the condition number. Exact up to rounding.

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
