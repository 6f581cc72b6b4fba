"""Cutting projection matrices into heads, one function per layout."""

# The names follow the algebra.
# ruff: noqa: N815

from __future__ import annotations

from dataclasses import dataclass

import torch

from rankscope._errors import UnsupportedConfigError
from rankscope.models.heads.family import Family


@dataclass(frozen=True)
class Projections:
    """Head weights with tokens as rows, shaped as in :class:`~rankscope.models.heads.HeadWeights`."""

    W_Q: torch.Tensor
    W_K: torch.Tensor
    W_V: torch.Tensor
    W_O: torch.Tensor
    b_Q: torch.Tensor
    b_K: torch.Tensor
    b_V: torch.Tensor
    b_O: torch.Tensor


@dataclass(frozen=True)
class _Matrix:
    """A linear map stored as (out, in), with its bias."""

    weight: torch.Tensor
    bias: torch.Tensor


def read_projections(family: Family, block: torch.nn.Module, heads: int) -> Projections:
    """The projections of ``block`` cut into ``heads`` heads.

    Raises:
        UnsupportedConfigError: a path of the family is not in the block, or sizes do not fit.
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
    return Projections(
        W_Q=_cut(query.weight, heads),
        W_K=_cut(key.weight, groups),
        W_V=_cut(value.weight, groups),
        W_O=_cut_output(output.weight, heads),
        b_Q=query.bias.reshape(heads, -1),
        b_K=key.bias.reshape(groups, -1),
        b_V=value.bias.reshape(groups, -1),
        b_O=output.bias,
    )


def _cut(weight: torch.Tensor, parts: int) -> torch.Tensor:
    """(parts * d, dim) to (parts, dim, d)."""
    return weight.reshape(parts, -1, weight.shape[1]).transpose(1, 2)


def _cut_output(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """(dim, heads * d) to (heads, d, dim)."""
    return weight.reshape(weight.shape[0], heads, -1).permute(1, 2, 0)


def _unstacked(family: Family, fused: _Matrix, heads: int, width: int) -> list[_Matrix]:
    """All queries, then all keys, then all values."""
    rest = fused.weight.shape[0] - heads * width
    if rest <= 0 or rest % (2 * width):
        raise _unfit(family, f"a fused matrix of {fused.weight.shape[0]} rows for {heads} heads of width {width}")
    sizes = [heads * width, rest // 2, rest // 2]
    pairs = zip(torch.split(fused.weight, sizes), torch.split(fused.bias, sizes), strict=True)
    return [_Matrix(weight, bias) for weight, bias in pairs]


def _grouped(family: Family, fused: _Matrix, output: _Matrix, heads: int, width: int) -> Projections:
    """Group by group: the queries of the group, its key, its value."""
    rows = _divided(family, fused.weight.shape[0], width) - heads
    if rows <= 0 or rows % 2 or heads % (rows // 2):
        raise _unfit(family, f"a fused matrix of {fused.weight.shape[0]} rows for {heads} heads of width {width}")
    groups, shared = rows // 2, heads // (rows // 2)
    weight = fused.weight.reshape(groups, shared + 2, width, -1).transpose(-1, -2)
    bias = fused.bias.reshape(groups, shared + 2, width)
    return Projections(
        W_Q=weight[:, :shared].flatten(0, 1),
        W_K=weight[:, shared],
        W_V=weight[:, shared + 1],
        W_O=_cut_output(output.weight, heads),
        b_Q=bias[:, :shared].flatten(0, 1),
        b_K=bias[:, shared],
        b_V=bias[:, shared + 1],
        b_O=output.bias,
    )


def _einsum(family: Family, block: torch.nn.Module, heads: int) -> Projections:
    """Parameters (dim, heads, d); XLNet's bias on the content query is the query bias."""
    query, key, value, output = (_parameter(family, block, path) for path in (*family.projections, family.output))
    if any(found.ndim != 3 or found.shape[1] != heads for found in (query, key, value, output)):
        raise _unfit(family, f"parameters of shape {tuple(query.shape)} for {heads} heads")
    owner = family.output.rpartition(".")[0]
    zeros = value.new_zeros(heads, value.shape[2])
    return Projections(
        W_Q=query.transpose(0, 1),
        W_K=key.transpose(0, 1),
        W_V=value.transpose(0, 1),
        W_O=output.permute(1, 2, 0),
        b_Q=_parameter(family, block, f"{owner}.r_w_bias"),
        b_K=key.new_zeros(heads, key.shape[2]),
        b_V=zeros,
        b_O=output.new_zeros(output.shape[0]),
    )


def _matrix(family: Family, block: torch.nn.Module, path: str) -> _Matrix:
    weight = _parameter(family, block, f"{path}.weight")
    if weight.ndim != 2 or not weight.is_floating_point():
        raise _unfit(family, f"{path}.weight of shape {tuple(weight.shape)} and dtype {weight.dtype}")
    weight = weight.T if family.transposed else weight
    bias = dict(block.named_parameters(remove_duplicate=False)).get(f"{path}.bias")
    return _Matrix(weight, weight.new_zeros(weight.shape[0]) if bias is None else bias.detach())


def _parameter(family: Family, block: torch.nn.Module, path: str) -> torch.Tensor:
    found = dict(block.named_parameters(remove_duplicate=False)).get(path)
    if found is None:
        raise UnsupportedConfigError(
            f"A {type(block).__name__} has no parameter {path!r}, which the family {family.name!r} expects. "
            "Pass one block of the model, not a part of it or the whole."
        )
    return found.detach()


def _divided(family: Family, size: int, parts: int) -> int:
    if size % parts:
        raise _unfit(family, f"{size} rows cannot be cut into {parts} equal parts")
    return size // parts


def _unfit(family: Family, what: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(f"The weights do not fit the family {family.name!r}: {what}.")
