"""Networks without their numbers: laid out on the meta device, where tensors have shapes only."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def on_meta() -> Iterator[None]:
    """Tensors made inside have a shape, a dtype and no memory.

    Modeling code imports ``torch._dynamo``, which (in torch 2.6; not in 2.13) computes with small tensors while it is
    imported and cannot do so on the meta device. So it is imported before.
    """
    import torch

    if torch.__version__ < "2.13":
        importlib.import_module("torch._dynamo")
    with torch.device("meta"):
        yield
