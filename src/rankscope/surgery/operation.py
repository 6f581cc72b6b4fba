"""A frozen, serialisable description of what is done to a model, without tensors or hooks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, SupportsIndex, get_args

from rankscope.errors import InputError
from rankscope.masks import Mask
from rankscope.models.view import Label

MlpChoice = Literal["keep", "drop"]
NormChoice = Literal["keep", "identity", "scale", "rms"]
MaskChoice = Literal["replace", "intersect", "unite"]
AttentionChoice = Literal["keep", "uniform", "centred"]


@dataclass(frozen=True)
class Operation:
    """One set of changes to some or all blocks.

    Attributes:
        attention_skip: gain on the stream where attention (or another token mixer) is added; 0 removes the skip.
        mlp_skip: gain on the stream where the MLP is added.
        mlp: ``"drop"`` adds nothing to a skip, and passes the stream on unchanged if the skip is removed.
        norm: ``"identity"`` removes norms, ``"scale"`` only divides each token by its length,
            ``"rms"`` by its root mean square.
        mask: which keys each query may see.
        mask_mode: whether ``mask`` replaces the model's own mask, or is intersected or united with it. Padding stays
            hidden in every case, and cross-attention, whose keys are other tokens, keeps its own.
        temperature: divides scores.
        attention: ``"uniform"`` over the visible keys, or ``"centred"``, which subtracts that uniform matrix.
        attention_scale: 1 + omega of AttnScale: factor on the deviation from uniform attention.
        heads: removed heads.
        layers: blocks it applies to; None for all.
        stack: the stack it applies to; None for all.
    """

    attention_skip: float = 1.0
    mlp_skip: float = 1.0
    mlp: MlpChoice = "keep"
    norm: NormChoice = "keep"
    mask: Mask | None = None
    mask_mode: MaskChoice = "replace"
    temperature: float = 1.0
    attention: AttentionChoice = "keep"
    attention_scale: float = 1.0
    heads: frozenset[int] = frozenset()
    layers: frozenset[int] | None = None
    stack: str | None = None

    def __post_init__(self) -> None:
        choices: Mapping[str, Any] = {
            "mlp": MlpChoice,
            "norm": NormChoice,
            "mask_mode": MaskChoice,
            "attention": AttentionChoice,
        }
        for name, options in choices.items():
            if getattr(self, name) not in get_args(options):
                allowed = ", ".join(repr(option) for option in get_args(options))
                raise InputError(f"{name}={getattr(self, name)!r} is none of {allowed}.")
        for name in ("attention_skip", "mlp_skip", "temperature", "attention_scale"):
            if not math.isfinite(getattr(self, name)):
                raise InputError(f"{name}={getattr(self, name)!r} is not a finite number.")
        if self.temperature <= 0:
            raise InputError(f"temperature={self.temperature!r}: expected a positive number.")
        for name in ("heads", "layers"):
            if not all(type(number) is int and number >= 0 for number in getattr(self, name) or ()):
                raise InputError(f"{name}={sorted(getattr(self, name), key=str)}: expected whole numbers from 0.")

    def applies_to(self, stack: str | None, layer: int) -> bool:
        """Whether the operation applies to a block."""
        return (self.stack is None or self.stack == stack) and (self.layers is None or layer in self.layers)

    def gain(self, label: Label) -> float:
        """Gain on the stream where a branch with this label is added."""
        return self.mlp_skip if label == "mlp" else self.attention_skip

    @property
    def touches_attention(self) -> bool:
        """Whether attention itself is changed."""
        plain = self.mask is None and self.temperature == 1.0 and self.attention == "keep"
        return not (plain and self.attention_scale == 1.0 and not self.heads)

    def describe(self) -> dict[str, Any]:
        """The operation in plain JSON types, without what it leaves unchanged."""
        default = Operation()
        changed: dict[str, Any] = {}
        for name in ("attention_skip", "mlp_skip", "mlp", "norm", "temperature", "attention", "attention_scale"):
            if getattr(self, name) != getattr(default, name):
                changed[name] = getattr(self, name)
        if self.mask is not None:
            changed |= {"mask": str(self.mask), "mask_mode": self.mask_mode}
        if self.heads:
            changed["heads"] = sorted(self.heads)
        if self.layers is not None:
            changed["layers"] = sorted(self.layers)
        return changed if self.stack is None else changed | {"stack": self.stack}


def number_set(numbers: SupportsIndex | Collection[SupportsIndex]) -> frozenset[int]:
    """One or several numbers as a set of integers."""
    return frozenset(map(index, numbers if isinstance(numbers, Collection) else (numbers,)))
