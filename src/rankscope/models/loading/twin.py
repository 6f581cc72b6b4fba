"""The same architecture before training."""

from __future__ import annotations

import copy

import torch

from rankscope._errors import LoadError
from rankscope.models.loading._load import LoadedModel, load
from rankscope.models.loading.quiet import quiet_transformers


def load_initialised_twin(loaded: LoadedModel, *, seed: int) -> LoadedModel:
    """A random initialisation of the class and configuration of ``loaded``, in its dtype and on its device.

    Raises:
        LoadError: for a module that is not from transformers: nothing tells how to build it.
    """
    config = loaded.config
    if config is None:
        raise LoadError(
            f"{loaded.spec} is not a transformers model, so a random initialisation of it cannot be built. "
            "Build it yourself and pass that."
        )
    first = next(loaded.model.parameters())
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        twin = type(loaded.model)(copy.deepcopy(config))
    return load(twin.to(dtype=first.dtype, device=first.device).eval())
