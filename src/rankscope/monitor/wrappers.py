"""The model inside its wrappers."""

from __future__ import annotations

import sys
from typing import cast

import torch
from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """The module under DDP, ``DataParallel`` and ``torch.compile``, which share its parameters.

    A forward pass of it takes part in no communication. FSDP is left on: without it there is nothing to run.
    """
    while True:
        inner = _inside(model)
        if inner is None:
            return model
        model = inner


def _inside(model: nn.Module) -> nn.Module | None:
    if isinstance(model, nn.DataParallel):
        return cast(nn.Module, model.module)
    if torch.distributed.is_available():
        from torch.nn.parallel import DistributedDataParallel

        if isinstance(model, DistributedDataParallel):
            return cast(nn.Module, model.module)
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.eval_frame import OptimizedModule

        if isinstance(model, OptimizedModule):
            return model._orig_mod
    return None


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, or a part of it, runs compiled."""
    if any(module._compiled_call_impl for module in model.modules()):
        return True
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.eval_frame import OptimizedModule

    return any(isinstance(module, OptimizedModule) for module in model.modules())
