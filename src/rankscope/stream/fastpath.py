"""Torch's fused transformer encoder, which runs a whole layer in one opaque call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_fastpath() -> Iterator[None]:
    """Switch the fused path of ``nn.TransformerEncoderLayer`` off, and back to what it was."""
    was_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_on)
