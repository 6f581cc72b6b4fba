"""The weights of single attention heads, read out of a block as views."""

# The names follow the algebra.
# ruff: noqa: N802, N815

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rankscope._errors import UnsupportedConfigError
from rankscope.models.heads.family import ABSENT, Family, config_value, family_of
from rankscope.models.heads.layouts import Projections, read_projections


@dataclass(frozen=True, eq=False)
class HeadWeights:
    r"""Weights such that attention is :math:`\sum_h P_h (X W_{V,h} + 1 b_{V,h}^T) W_{O,h} + 1 b_O^T`. Exact.

    Tokens are rows: ``X W``. Tensors are detached views of the model's own parameters wherever the layout allows.

    Attributes:
        W_Q: (heads, dim, d_qk).
        W_K_groups: (groups, dim, d_qk); several heads share a group in grouped-query attention.
        W_V_groups: (groups, dim, d_v).
        W_O: (heads, d_v, dim).
        b_Q: (heads, d_qk); zeros where the model has no bias, as for the others.
        b_K_groups: (groups, d_qk).
        b_V_groups: (groups, d_v).
        b_O: (dim,).
        kv_of_head: (heads,), the key-value group of each head.
        scale: factor on query times key.
        rotary: queries and keys are rotated by position before they meet.
        qk_norm: queries and keys are normalised before they meet, so that scores are not bilinear in X.
        notes: what else happens that these weights do not tell.
    """

    W_Q: torch.Tensor
    W_K_groups: torch.Tensor
    W_V_groups: torch.Tensor
    W_O: torch.Tensor
    b_Q: torch.Tensor
    b_K_groups: torch.Tensor
    b_V_groups: torch.Tensor
    b_O: torch.Tensor
    kv_of_head: torch.Tensor
    scale: float
    rotary: bool
    qk_norm: bool
    notes: tuple[str, ...] = ()

    @property
    def heads(self) -> int:
        """How many query heads there are."""
        return self.W_Q.shape[0]

    @property
    def W_K(self) -> torch.Tensor:
        """(heads, dim, d_qk); a copy only where heads share a group."""
        return self._per_head(self.W_K_groups)

    @property
    def W_V(self) -> torch.Tensor:
        """(heads, dim, d_v); a copy only where heads share a group."""
        return self._per_head(self.W_V_groups)

    @property
    def b_K(self) -> torch.Tensor:
        """(heads, d_qk)."""
        return self._per_head(self.b_K_groups)

    @property
    def b_V(self) -> torch.Tensor:
        """(heads, d_v)."""
        return self._per_head(self.b_V_groups)

    def _per_head(self, groups: torch.Tensor) -> torch.Tensor:
        return groups if groups.shape[0] == self.heads else groups[self.kv_of_head]


def head_weights(block: torch.nn.Module, config: Any) -> HeadWeights:
    """The head weights of one block's self-attention.

    Args:
        block: one block of the model, as discovery finds it.
        config: the model's configuration; of a model made of several, the part the block belongs to is taken.

    Raises:
        UnsupportedConfigError: no description fits, the configuration is not understood, or the block is not of the
            family.
    """
    own = _own_config(block, config)
    family = family_of(own)
    read = read_projections(family, block, _heads(family, own))
    groups = read.W_K.shape[0]
    qk_norm = config_value(own, family.qk_norm) is True if isinstance(family.qk_norm, str) else family.qk_norm
    return HeadWeights(
        W_Q=read.W_Q,
        W_K_groups=read.W_K,
        W_V_groups=read.W_V,
        W_O=read.W_O,
        b_Q=read.b_Q,
        b_K_groups=read.b_K,
        b_V_groups=read.b_V,
        b_O=read.b_O,
        kv_of_head=torch.arange(read.W_Q.shape[0]) // (read.W_Q.shape[0] // groups),
        scale=_scale(family, own, read),
        rotary=family.position == "rotary" and config_value(own, "alibi") is not True,
        qk_norm=qk_norm,
        notes=family.notes,
    )


def _own_config(block: torch.nn.Module, config: Any) -> Any:
    """Of a configuration made of several (text and vision, say), the one the block's own modules hold."""
    from transformers import PretrainedConfig

    if not config.sub_configs:
        return config
    for module in block.modules():
        held = vars(module).get("config")
        if isinstance(held, PretrainedConfig) and not held.sub_configs:
            return held
    return config


def _heads(family: Family, config: Any) -> int:
    numbers = {key: config_value(config, key) for key in family.heads}
    if len(set(numbers.values())) != 1 or not all(isinstance(number, int) for number in numbers.values()):
        shown = ", ".join(f"{key}={'absent' if number is ABSENT else number}" for key, number in numbers.items())
        raise UnsupportedConfigError(f"The number of heads of {config.model_type!r} is not clear: {shown}.")
    return int(next(iter(numbers.values())))


def _scale(family: Family, config: Any, read: Projections) -> float:
    if family.scale == "one":
        return 1.0
    if family.scale == "head width":
        return float(read.W_Q.shape[-1] ** -0.5)
    value = config_value(config, family.scale_key)
    if not isinstance(value, (int, float)) or value <= 0:
        raise UnsupportedConfigError(
            f"The scale of {config.model_type!r} is read from {family.scale_key}={value!r}; expected a number above 0."
        )
    return float(value if family.scale == "value" else value**-0.5)
