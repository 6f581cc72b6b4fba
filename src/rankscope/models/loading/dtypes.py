"""Float dtypes by name, and torch's default dtype inside a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rankscope.errors import LoadError

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating torch dtype, given as itself or by name; None stays None.

    Example:
        >>> parse_dtype("float64")
        torch.float64
    """
    if dtype is None:
        return None
    parsed = _DTYPES.get(str(dtype).removeprefix("torch."))
    if parsed is None:
        raise LoadError(f"dtype {str(dtype)!r} is not one of {', '.join(_DTYPES)}.")
    return parsed


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make ``dtype`` torch's default; the previous default is restored."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
