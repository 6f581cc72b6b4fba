"""Checks whether a configuration needs more memory than this machine has, before anything is built."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from time import thread_time
from typing import Any, NamedTuple

import torch

from rankscope.errors import LoadError
from rankscope.models.loading.foreign import refusing

MOST_LAYERS = 10**5
MOST_MODULES = 250_000
LONGEST_BUILD = 8.0
"""Seconds of processor time for one build on the meta device; 100 layers of a known family take less than one."""
MOST_GROWTH = 64
"""Maximum bytes in memory per byte of a checkpoint; weights of one bit that are unpacked to float32 have 32."""
ALWAYS_ALLOWED = 2**28
"""Bytes that a network may take whatever the size of its checkpoint."""


@contextmanager
def on_meta() -> Iterator[None]:
    """Create tensors on the meta device: with a shape and a dtype, but no memory.

    Modeling code imports ``torch._dynamo``, which (in torch 2.6; not in 2.13) computes with small tensors while it is
    imported and cannot do so on the meta device. So it is imported first.
    """
    if torch.__version__ < "2.13":
        importlib.import_module("torch._dynamo")
    with torch.device("meta"):
        yield


class NetworkSize(NamedTuple):
    """What a network takes: the number of parameters, the bytes of its buffers."""

    parameters: int
    buffers: int


def refuse_unaffordable(
    config: Any,
    build: Callable[[Any], torch.nn.Module],
    dtype: torch.dtype | None,
    memory: int | None = None,
    stored: int | None = None,
) -> None:
    """Raise if the parameters and buffers of a configuration alone do not fit into memory.

    Args:
        config: a transformers configuration.
        build: builds the network; called on the meta device, where tensors have shapes but no data.
        dtype: dtype that the parameters will have; None for float32.
        memory: bytes; None for all memory of the machine.
        stored: bytes of the weights that the configuration comes with, which must belong to it; None without weights.

    Raises:
        LoadError: with the estimate.
    """
    size = size_of(config, build)
    refuse_larger_than_memory(size.parameters, dtype, memory, size.buffers)
    needed = size.parameters * (dtype or torch.float32).itemsize + size.buffers
    if stored is not None and needed > MOST_GROWTH * stored + ALWAYS_ALLOWED:
        raise LoadError(
            f"The configuration asks for about {size.parameters:,} parameters and {size.buffers / 2**30:.1f} GiB of "
            f"buffers, and its weights have {stored:,} bytes: they do not belong together. Nothing was allocated. "
            "Fetch the model again; for a random initialisation pass init:FOLDER."
        )


def refuse_larger_than_memory(
    parameters: int, dtype: torch.dtype | None, memory: int | None = None, buffers: int = 0
) -> None:
    """Raise if this many parameters, and this many bytes of buffers, do not fit into memory.

    Raises:
        LoadError: with the estimate.
    """
    room = memory or _installed()
    needed = parameters * (dtype or torch.float32).itemsize + buffers
    if room is not None and needed > room:
        beside = f" and {buffers / 2**30:.1f} GiB of buffers" if buffers > 2**30 else ""
        raise LoadError(
            f"The configuration asks for about {parameters:,} parameters{beside}, {needed / 2**30:.1f} GiB, and there "
            f"are {room / 2**30:.1f} GiB of memory. Nothing was allocated. Use a smaller dtype, or measure --offload "
            "for a model that lies on disk."
        )


def refuse_endless_lists(described: Mapping[str, Any]) -> None:
    """Raise for a configuration, not built yet, with too many layers or labels: families list each one in building.

    Raises:
        LoadError: the message has the number.
    """
    for key, value in described.items():
        if isinstance(value, Mapping):
            refuse_endless_lists(value)
        elif ("layer" in key or key == "num_labels") and isinstance(value, (int, float)) and value > MOST_LAYERS:
            raise LoadError(
                f"The configuration asks for {value:,} {'layers' if 'layer' in key else key}; more than "
                f"{MOST_LAYERS:,} are not built. Nothing was allocated."
            )


def size_of(config: Any, build: Callable[[Any], torch.nn.Module]) -> NetworkSize:
    """What a configuration asks for, from a build without data.

    Raises:
        LoadError: it cannot be built, or the build does not end.
    """
    # Sizes may overflow or be refused by a family, and a backbone may need a package: any exception is possible.
    with refusing(LoadError, "The configuration cannot be laid out", "Check it."), on_meta(), _not_endless():
        model = build(copy.deepcopy(config))
    return NetworkSize(
        sum(parameter.numel() for parameter in model.parameters()),
        sum(buffer.numel() * buffer.itemsize for buffer in model.buffers()),
    )


@contextmanager
def _not_endless() -> Iterator[None]:
    """Stop a build in this thread that registers too many modules or parameters, or takes too long.

    Any number of a configuration may be how often some family repeats something. The hooks are torch's own and see each
    module and parameter as it is assigned.
    """
    from torch.nn.modules.module import (
        register_module_module_registration_hook,
        register_module_parameter_registration_hook,
    )

    thread, began, seen = get_ident(), 0.0, 0

    def count(module: Any, name: str, part: Any) -> None:
        nonlocal seen, began
        if get_ident() != thread:
            return
        if seen == 0:  # before the first part, its class is imported, and on a new machine compiled
            began = thread_time()
        seen += 1
        if seen > 2 * MOST_MODULES or thread_time() - began > LONGEST_BUILD:
            raise LoadError(
                f"The configuration has too many modules: {seen:,} after {thread_time() - began:.0f} s, and more. "
                "Nothing was allocated."
            )

    hooks = (register_module_module_registration_hook(count), register_module_parameter_registration_hook(count))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _installed() -> int | None:
    """Memory of the machine; None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
