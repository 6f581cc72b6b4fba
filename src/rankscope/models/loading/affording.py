"""Checks whether a configuration needs more memory than this machine has, before anything is built."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rankscope.errors import LoadError, RankscopeError


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
LAYER_NAMES = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "n_layers")


def refuse_unaffordable(
    config: Any, build: Callable[[Any], torch.nn.Module], dtype: torch.dtype | None, memory: int | None = None
) -> None:
    """Raise if the parameters of a configuration alone do not fit into memory.

    Args:
        config: a transformers configuration.
        build: builds the network; called on the meta device, where tensors have shapes but no data.
        dtype: dtype that the parameters will have; None for float32.
        memory: bytes; None for all memory of the machine.

    Raises:
        LoadError: with the estimate.
    """
    layers = max((count for _, _, count in _layer_counts(config)), default=0)
    if layers > MOST_LAYERS:
        raise _too_many(layers, "layers")
    refuse_larger_than_memory(_counted(config, build, layers), dtype, memory)


def refuse_larger_than_memory(parameters: int, dtype: torch.dtype | None, memory: int | None = None) -> None:
    """Raise if this many parameters do not fit into memory.

    Raises:
        LoadError: with the estimate.
    """
    room = memory or _installed()
    needed = parameters * (dtype or torch.float32).itemsize
    if room is not None and needed > room:
        raise LoadError(
            f"The configuration asks for about {parameters:,} parameters, {needed / 2**30:.1f} GiB, and there are "
            f"{room / 2**30:.1f} GiB of memory. Nothing was allocated. Use a smaller dtype, or measure --offload for a "
            "model that lies on disk."
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


def _counted(config: Any, build: Callable[[Any], torch.nn.Module], layers: int) -> int:
    if layers <= MANY_LAYERS:
        return _parameters(config, build)
    one, two = (_parameters(_with_layers(config, count), build) for count in (1, 2))
    return one + (layers - 1) * (two - one)


def _parameters(config: Any, build: Callable[[Any], torch.nn.Module]) -> int:
    try:
        with on_meta():
            return sum(parameter.numel() for parameter in build(copy.deepcopy(config)).parameters())
    except (RankscopeError, MemoryError, ImportError):  # not a fault of the configuration
        raise
    except Exception as error:  # sizes that overflow, or that a family refuses: any exception is possible
        raise LoadError(f"The configuration cannot be laid out: {' '.join(str(error).split())[:300]}") from error


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
    from transformers import PreTrainedConfig

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
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
