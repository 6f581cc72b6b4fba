"""Runs a model during its training without affecting the training.

Always restored: mode of every module, gradient mode, random states (Python, NumPy, torch on every device),
buffers the forward pass wrote to or replaced, autocast and its cache of cast weights, FSDP2's sharded parameters.
Compiled code is neither run nor recompiled.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.models.loading.devices import devices_in_use, random_state, set_random_state
from rankscope.stream.viewing import undisturbed


@contextmanager
def beside_training(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; all training state is preserved."""
    with ExitStack() as stack:
        stack.enter_context(same_random_state())
        stack.enter_context(_same_buffers(model))
        stack.enter_context(_without_autocast_cache())
        stack.enter_context(_uncompiled(model))
        stack.enter_context(undisturbed(model))
        yield


@contextmanager
def same_random_state() -> Iterator[None]:
    """Restore the random states, so that draws inside do not affect later ones."""
    python, numpy = random.getstate(), np.random.get_state()
    states = [(device, random_state(device)) for device in devices_in_use()]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for device, state in states:
            set_random_state(device, state)


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Copy buffers first; restore those that were written to or replaced."""
    before = [
        (module, name, buffer, None if buffer is None else (buffer._version, buffer.detach().clone()))
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, name, buffer, kept in before:
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
            if buffer is not None and kept is not None and buffer._version != kept[0]:
                with torch.no_grad():
                    buffer.copy_(kept[1])


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Inside an open autocast, weights cast without gradients must not stay for the training forward to find."""
    was_on = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_on)


@contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """Run what ``torch.compile`` wrapped in eager mode; compiled code is kept."""
    compiled = [(module, module._compiled_call_impl) for module in model.modules() if module._compiled_call_impl]
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module, _ in compiled:
            module._compiled_call_impl = None
        try:
            yield
        finally:
            for module, call in compiled:
                module._compiled_call_impl = call


@contextmanager
def full_precision(tensor: Tensor) -> Iterator[None]:
    """Reduce numbers without gradients and outside autocast, even in the middle of a training forward."""
    with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        yield


def unwrapped(model: nn.Module) -> nn.Module:
    """The module under DDP, ``DataParallel`` and ``torch.compile``, which share its parameters.

    Its forward pass involves no communication. FSDP is kept, because the model cannot run without it.
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
