"""What the caller of ``load`` asked for, and what reading weights gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rankscope._errors import LoadError, MissingExtraError
from rankscope.models.spread import Spread


@dataclass(frozen=True)
class Request:
    """What the caller of ``load`` allowed and asked for."""

    seed: int
    dtype: torch.dtype | None
    revision: str | None
    trust_remote_code: bool
    allow_pickle: bool
    model_class: str | None
    spread: Spread | None = None
    placement: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Weights:
    """A model with weights, its tokenizer if there is one, and remarks worth keeping."""

    model: torch.nn.Module
    tokenizer: Any | None
    revision: str | None
    notes: tuple[str, ...]


def placement_of(device_map: str | Mapping[str, int | str] | None, offload_folder: str | Path | None) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that put parts of a model on several devices, or on disk."""
    from importlib.util import find_spec

    if device_map is None:
        if offload_folder is not None:
            raise LoadError("offload_folder holds what device_map puts on disk, and there is none. Add device_map.")
        return {}
    if find_spec("accelerate") is None:
        raise MissingExtraError("device_map", "accelerate", "accelerate")
    placed = device_map if isinstance(device_map, str) else dict(device_map)
    folder = {} if offload_folder is None else {"offload_folder": str(offload_folder)}
    return {"device_map": placed, **folder}
