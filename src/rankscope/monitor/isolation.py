"""Runs a model during its training without affecting the training.

Always restored: mode of every module, gradient mode, random states (Python, NumPy, torch on every device),
buffers the forward pass wrote to or replaced, autocast and its cache of cast weights, FSDP2's sharded parameters.
Compiled code is neither run nor recompiled.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.models.loading.devices import devices_in_use, random_state, set_random_state
from rankscope.models.wrapping import same_buffers, uncompiled
from rankscope.stream.viewing import undisturbed


@contextmanager
def beside_training(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; all training state is preserved."""
    with ExitStack() as stack:
        stack.enter_context(same_random_state())
        stack.enter_context(same_buffers(model))
        stack.enter_context(_without_autocast_cache())
        stack.enter_context(undisturbed(model))
        yield


@contextmanager
def examining(model: nn.Module) -> Iterator[None]:
    """The model as it is trained, with gradients, for the doctor; all training state is preserved."""
    with ExitStack() as stack:
        stack.enter_context(same_random_state())
        stack.enter_context(same_buffers(model))
        stack.enter_context(_without_autocast_cache())
        stack.enter_context(uncompiled(model))
        stack.enter_context(torch.enable_grad())
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
def _without_autocast_cache() -> Iterator[None]:
    """Inside an open autocast, weights cast without gradients must not stay for the training forward to find."""
    was_on = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_on)


@contextmanager
def full_precision(tensor: Tensor) -> Iterator[None]:
    """Reduce numbers without gradients and outside autocast, even in the middle of a training forward."""
    with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        yield
