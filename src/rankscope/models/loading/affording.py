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

from rankscope.errors import LoadError, RankscopeError
from rankscope.models.hf import is_hf_config


@contextmanager
def on_meta() -> Iterator[None]:
    """Create tensors on the meta device: with a shape and a dtype, but no memory.

    Modeling code imports ``torch._dynamo``, which (in torch 2.6; not in 2.13) computes with small tensors while it is
    imported and cannot do so on the meta device. So it is imported first.
    """
    import torch

    if torch.__version__ < "2.13":
        importlib.import_module("torch._dynamo")
    with torch.device("meta"):
        yield


MANY_LAYERS = 512
"""Up to this size a network is built on the meta device as it is; beyond it, two small ones are extrapolated."""
MOST_LAYERS = 10**5
MOST_MODULES = 250_000
LONGEST_BUILD = 8.0
"""Seconds of processor time for one build on the meta device; 100 layers of a known family take less than one."""
MOST_GROWTH = 64
"""Maximum bytes in memory per byte of a checkpoint; weights of one bit that are unpacked to float32 have 32."""
ALWAYS_ALLOWED = 2**28
"""Bytes that a network may take whatever the size of its checkpoint."""
LAYER_NAMES = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "n_layers")


class NetworkSize(NamedTuple):
    """What a network takes: the number of parameters, the bytes of its buffers, the number of modules."""

    parameters: int
    buffers: int
    modules: int


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
    layers = max((count for _, _, count in _layer_counts(config)), default=0)
    if layers > MOST_LAYERS:
        raise _too_many(layers, "layers")
    size = _counted(config, build, layers)
    refuse_larger_than_memory(size.parameters, dtype, memory, size.buffers)
    if size.modules > MOST_MODULES:
        raise _endless(f"{size.modules:,} modules; more than {MOST_MODULES:,} are not built")
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
    waiting = [described]
    while waiting:
        for key, value in waiting.pop().items():
            if isinstance(value, Mapping):
                waiting.append(value)
            elif ("layer" in key or key == "num_labels") and isinstance(value, (int, float)) and value > MOST_LAYERS:
                raise _too_many(value, key)


def _too_many(count: float, name: str) -> LoadError:
    layers = "layers" if "layer" in name else name
    return LoadError(
        f"The configuration asks for {count:,} {layers}; more than {MOST_LAYERS:,} are not built. "
        "Nothing was allocated."
    )


def _endless(what: str) -> LoadError:
    return LoadError(f"The configuration asks for {what}. Nothing was allocated.")


def _counted(config: Any, build: Callable[[Any], torch.nn.Module], layers: int) -> NetworkSize:
    if layers <= MANY_LAYERS:
        return _size(config, build)
    one, two = (_size(_with_layers(config, count), build) for count in (1, 2))
    return NetworkSize(*(first + (layers - 1) * (second - first) for first, second in zip(one, two, strict=True)))


def _size(config: Any, build: Callable[[Any], torch.nn.Module]) -> NetworkSize:
    try:
        with on_meta(), _not_endless():
            model = build(copy.deepcopy(config))
    except (RankscopeError, MemoryError):
        raise
    except ImportError as error:  # a backbone of timm, for example
        raise LoadError(
            f"The model needs a package that is not installed: {' '.join(str(error).split())[:300]}"
        ) from error
    except Exception as error:  # sizes that overflow, or that a family refuses: any exception is possible
        raise LoadError(f"The configuration cannot be laid out: {' '.join(str(error).split())[:300]}") from error
    return NetworkSize(
        sum(parameter.numel() for parameter in model.parameters()),
        sum(buffer.numel() * buffer.itemsize for buffer in model.buffers()),
        sum(1 for _ in model.modules()),
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
            raise _endless(
                f"so many parts that {seen:,} were laid out in {thread_time() - began:.0f} s, without an end"
            )

    hooks = (register_module_module_registration_hook(count), register_module_parameter_registration_hook(count))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _with_layers(config: Any, count: int) -> Any:
    small = copy.deepcopy(config)
    for part, name, _ in list(_layer_counts(small)):
        setattr(part, name, count)
    return small


def _layer_counts(config: Any) -> Iterator[tuple[Any, str, int]]:
    for part in _parts(config):
        for name in LAYER_NAMES:
            if count := _whole(part, name):
                yield part, name, count


def _parts(config: Any) -> Iterator[Any]:
    """The configuration and those inside it (text, vision, encoder ...)."""
    yield config
    for value in list(vars(config).values()):
        if is_hf_config(value):
            yield from _parts(value)


def _whole(part: Any, name: str) -> int:
    value = getattr(part, name, None)
    return value if type(value) is int and value > 0 else 0


def _installed() -> int | None:
    """Memory of the machine; None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
