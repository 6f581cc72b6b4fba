"""The weights of single attention heads, read from a block as views."""

# The names follow the algebra.
# ruff: noqa: N802, N815

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rankscope.errors import UnsupportedConfigError
from rankscope.models.heads.family import ABSENT, Family, config_value, family_of
from rankscope.models.hf import is_composite, is_hf_config
from rankscope.models.linear_maps import linear_at


@dataclass(frozen=True)
class _Linear:
    """A linear map stored as (out, in), with its bias."""

    weight: torch.Tensor
    bias: torch.Tensor


def read_projections(family: Family, block: torch.nn.Module, heads: int) -> dict[str, Any]:
    """The tensors of :class:`HeadWeights` by name, from a block with so many heads.

    Raises:
        UnsupportedConfigError: a path of the family is not in the block, or sizes do not match.
    """
    if family.layout == "einsum":
        return _einsum(family, block, heads)
    output = _matrix(family, block, family.output)
    d_v = _divided(family, output.weight.shape[1], heads)
    maps = [_matrix(family, block, path) for path in family.projections]
    if family.layout == "separate":
        query, key, value = maps
        d_qk = _divided(family, query.weight.shape[0], heads)
    elif family.layout == "stacked":
        query, key, value = _unstacked(family, maps[0], heads, d_v)
        d_qk = d_v
    else:
        return _grouped(family, maps[0], output, heads, d_v)
    groups = _divided(family, key.weight.shape[0], d_qk)
    if value.weight.shape[0] != groups * d_v or heads % groups:
        raise _unfit(family, f"{heads} heads over {groups} key groups, values of {value.weight.shape[0]} rows")
    return {
        "W_Q": _cut(query.weight, heads),
        "W_K_groups": _cut(key.weight, groups),
        "W_V_groups": _cut(value.weight, groups),
        "W_O": _cut_output(output.weight, heads),
        "b_Q": query.bias.reshape(heads, -1),
        "b_K_groups": key.bias.reshape(groups, -1),
        "b_V_groups": value.bias.reshape(groups, -1),
        "b_O": output.bias,
    }


def _cut(weight: torch.Tensor, parts: int) -> torch.Tensor:
    """(parts * d, dim) to (parts, dim, d)."""
    return weight.reshape(parts, -1, weight.shape[1]).transpose(1, 2)


def _cut_output(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """(dim, heads * d) to (heads, d, dim)."""
    return weight.reshape(weight.shape[0], heads, -1).permute(1, 2, 0)


def _unstacked(family: Family, fused: _Linear, heads: int, width: int) -> list[_Linear]:
    """All queries, then all keys, then all values."""
    rest = fused.weight.shape[0] - heads * width
    if rest <= 0 or rest % (2 * width):
        raise _unfit(family, f"a fused matrix of {fused.weight.shape[0]} rows for {heads} heads of width {width}")
    sizes = [heads * width, rest // 2, rest // 2]
    pairs = zip(torch.split(fused.weight, sizes), torch.split(fused.bias, sizes), strict=True)
    return [_Linear(weight, bias) for weight, bias in pairs]


def _grouped(family: Family, fused: _Linear, output: _Linear, heads: int, width: int) -> dict[str, Any]:
    """Group by group: the queries of the group, its key, its value."""
    rows = _divided(family, fused.weight.shape[0], width) - heads
    if rows <= 0 or rows % 2 or heads % (rows // 2):
        raise _unfit(family, f"a fused matrix of {fused.weight.shape[0]} rows for {heads} heads of width {width}")
    groups, shared = rows // 2, heads // (rows // 2)
    weight = fused.weight.reshape(groups, shared + 2, width, -1).transpose(-1, -2)
    bias = fused.bias.reshape(groups, shared + 2, width)
    return {
        "W_Q": weight[:, :shared].flatten(0, 1),
        "W_K_groups": weight[:, shared],
        "W_V_groups": weight[:, shared + 1],
        "W_O": _cut_output(output.weight, heads),
        "b_Q": bias[:, :shared].flatten(0, 1),
        "b_K_groups": bias[:, shared],
        "b_V_groups": bias[:, shared + 1],
        "b_O": output.bias,
    }


def _einsum(family: Family, block: torch.nn.Module, heads: int) -> dict[str, Any]:
    """Parameters (dim, heads, d); XLNet's bias on the content query is the query bias."""
    query, key, value, output = (_parameter(family, block, path) for path in (*family.projections, family.output))
    if any(weight.ndim != 3 or weight.shape[1] != heads for weight in (query, key, value, output)):
        raise _unfit(family, f"parameters of shape {tuple(query.shape)} for {heads} heads")
    owner = family.output.rpartition(".")[0]
    zeros = value.new_zeros(heads, value.shape[2])
    return {
        "W_Q": query.transpose(0, 1),
        "W_K_groups": key.transpose(0, 1),
        "W_V_groups": value.transpose(0, 1),
        "W_O": output.permute(1, 2, 0),
        "b_Q": _parameter(family, block, f"{owner}.r_w_bias"),
        "b_K_groups": key.new_zeros(heads, key.shape[2]),
        "b_V_groups": zeros,
        "b_O": output.new_zeros(output.shape[0]),
    }


def _matrix(family: Family, block: torch.nn.Module, path: str) -> _Linear:
    read = linear_at(block, path, transposed=family.transposed)
    if read is None:
        raise _absent(family, block, f"{path}.weight")
    weight = read.weight
    if weight.ndim != 2 or not weight.is_floating_point():
        raise _unfit(family, f"{path}.weight of shape {tuple(weight.shape)} and dtype {weight.dtype}")
    return _Linear(weight, weight.new_zeros(weight.shape[0]) if read.bias is None else read.bias)


def _parameter(family: Family, block: torch.nn.Module, path: str) -> torch.Tensor:
    parameter = dict(block.named_parameters(remove_duplicate=False)).get(path)
    if parameter is None:
        raise _absent(family, block, path)
    return parameter.detach()


def _absent(family: Family, block: torch.nn.Module, path: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(
        f"A {type(block).__name__} has no parameter {path!r}, which the family {family.name!r} expects. "
        "Pass one block of the model, not a part of it or the whole."
    )


def _divided(family: Family, size: int, parts: int) -> int:
    if size % parts:
        raise _unfit(family, f"{size} rows cannot be cut into {parts} equal parts")
    return size // parts


def _unfit(family: Family, what: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(f"The weights do not fit the family {family.name!r}: {what}.")


@dataclass(frozen=True, eq=False)
class HeadWeights:
    r"""Weights such that attention is :math:`\sum_h P_h (X W_{V,h} + 1 b_{V,h}^T) W_{O,h} + 1 b_O^T`. Exact.

    Tokens are rows: ``X W``. Tensors are detached views of the model's own parameters wherever the layout allows;
    quantised and adapted weights are read as dense ones.

    Attributes:
        W_Q: (heads, dim, d_qk).
        W_K_groups: (groups, dim, d_qk); several heads share a group in grouped-query attention.
        W_V_groups: (groups, dim, d_v).
        W_O: (heads, d_v, dim).
        b_Q: (heads, d_qk); zeros if the model has no bias, as for the others.
        b_K_groups: (groups, d_qk).
        b_V_groups: (groups, d_v).
        b_O: (dim,).
        kv_of_head: (heads,), the key-value group of each head.
        scale: factor on query times key.
        rotary: queries and keys are rotated by position before their product.
        qk_norm: queries and keys are normalised before their product, so scores are not bilinear in X.
        notes: other effects that these weights do not show.
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
        """Number of query heads."""
        return self.W_Q.shape[0]

    @property
    def W_K(self) -> torch.Tensor:
        """(heads, dim, d_qk); a copy only if heads share a group."""
        return self._per_head(self.W_K_groups)

    @property
    def W_V(self) -> torch.Tensor:
        """(heads, dim, d_v); a copy only if heads share a group."""
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
        config: the model's configuration; for a composite model, the part to which the block belongs is used.

    Raises:
        UnsupportedConfigError: no description matches, the configuration is not understood, or the block is not of the
            family.
    """
    own = _own_config(block, config)
    family = family_of(own)
    heads = _heads(family, own)
    read = read_projections(family, block, heads)
    qk_norm = config_value(own, family.qk_norm) is True if isinstance(family.qk_norm, str) else family.qk_norm
    return HeadWeights(
        **read,
        kv_of_head=torch.arange(heads) // (heads // len(read["W_K_groups"])),
        scale=_scale(family, own, read["W_Q"].shape[-1]),
        rotary=family.position == "rotary" and config_value(own, "alibi") is not True,
        qk_norm=qk_norm,
        notes=family.notes,
    )


def _own_config(block: torch.nn.Module, config: Any) -> Any:
    """From a composite configuration (e.g. text and vision), the one that the block's own modules use."""
    if not is_composite(config):
        return config
    for module in block.modules():
        held: Any = vars(module).get("config")
        if is_hf_config(held) and not is_composite(held):
            return held
    return config


def _heads(family: Family, config: Any) -> int:
    numbers = {key: config_value(config, key) for key in family.heads}
    if len(set(numbers.values())) != 1 or not all(isinstance(number, int) for number in numbers.values()):
        shown = ", ".join(f"{key}={'absent' if number is ABSENT else number}" for key, number in numbers.items())
        raise UnsupportedConfigError(f"The number of heads of {config.model_type!r} is not clear: {shown}.")
    return int(next(iter(numbers.values())))


def _scale(family: Family, config: Any, width: int) -> float:
    if family.scale == "one":
        return 1.0
    if family.scale == "head width":
        return float(width**-0.5)
    value = config_value(config, family.scale_key)
    if not isinstance(value, (int, float)) or value <= 0:
        raise UnsupportedConfigError(
            f"The scale of {config.model_type!r} is read from {family.scale_key}={value!r}; expected a number above 0."
        )
    return float(value if family.scale == "value" else value**-0.5)
