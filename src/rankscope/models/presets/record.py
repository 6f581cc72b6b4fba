"""What a preset is: a published shape, or a tiny twin of it, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

InputKind = Literal["text", "image", "audio", "text-to-text", "tensors"]


@dataclass(frozen=True)
class Preset:
    """A named architecture that can be initialised at random, without weights and without a network.

    Attributes:
        name: what follows ``init:`` in a model spec.
        model_type: the ``model_type`` of the transformers configuration.
        config: keys that differ from the defaults of that configuration.
        model_class: ``"AutoModel"`` or the transformers class to build.
        input_kind: what the model reads.
        summary: one line for listings.
    """

    name: str
    model_type: str
    config: Mapping[str, Any]
    model_class: str = "AutoModel"
    input_kind: InputKind = "text"
    summary: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", MappingProxyType(dict(self.config)))
