"""Freezes a network: one forward pass of the model, recorded as linear maps and checked along the way.

Nothing about a family is assumed except its head weights. The norms and gains on the stream are found by
comparing the observed tensors, and every attention branch is rebuilt from its heads and compared before it is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rankscope.errors import UnsupportedConfigError
from rankscope.ext.paths.network import FrozenBlock, FrozenNetwork
from rankscope.ext.paths.recorder import OnBlock, OnEntry, Recorder
from rankscope.linalg.precision import need_float64
from rankscope.models.heads.family import undescribed
from rankscope.models.inputs import Batch
from rankscope.models.loading.devices import device_of
from rankscope.models.view import ModelView
from rankscope.stream.mode import StreamMode


def freeze_network(
    view: ModelView, config: Any, batch: Batch, *, dtype: torch.dtype | None = None
) -> dict[str | None, FrozenNetwork]:
    """Run the model once on ``batch`` and return every stack as a frozen network.

    Raises:
        UnsupportedConfigError: no head weights, or the heads do not add up to a branch; with the block and the error.
    """
    networks: dict[str | None, FrozenNetwork] = {}

    def begin(stack: str | None, entry: Tensor) -> None:
        networks[stack] = FrozenNetwork(entry)

    def add(block: FrozenBlock) -> None:
        networks[block.stack].blocks.append(block)

    run_frozen(view, config, batch, begin, add, dtype=dtype)
    return networks


def run_frozen(
    view: ModelView,
    config: Any,
    batch: Batch,
    on_entry: OnEntry,
    on_block: OnBlock,
    *,
    dtype: torch.dtype | None = None,
    before: Tensor | None = None,
    keep_seen: bool = False,
) -> Any:
    """Freeze block by block while the model runs, so that nothing has to be kept; returns the model's output.

    For a model that is run in parts, ``before`` is the output of the block before this part. With ``keep_seen``, each
    attention step includes the input and output of attention in the model, which takes as much memory again as the
    stream.
    """
    if config is None:
        raise UnsupportedConfigError(f"Paths need the weights of single heads, and {undescribed(view.model)}.")
    need_float64(device_of(view.model.parameters()), "Splitting a model into paths")
    recorder = Recorder(view, config, on_entry, on_block, dtype, before=before, keep_seen=keep_seen)
    with torch.no_grad(), StreamMode(view, recorder).active():
        return batch.run(view.model)
