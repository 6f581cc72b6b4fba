"""Norms of the gradients of queries, keys and values, layer by layer.

If all tokens are equal, attention does not depend on queries and keys, and their gradients are exactly zero while those
of the values are not (Noci et al., 2022).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rankscope._types import Status
from rankscope.errors import UnsupportedConfigError
from rankscope.linalg.precision import widest
from rankscope.linalg.to_host import to_host
from rankscope.models.heads import head_weights
from rankscope.models.heads.family import Family, family_of
from rankscope.models.view import ModelView
from rankscope.models.wrapping import whole
from rankscope.monitor.readings import LayerValue

_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
    ("wq", "wk", "wv"),
    ("w_q", "w_k", "w_v"),
    ("q", "k", "v"),
)
_STACKED = re.compile(r"(^|\.)(in_proj_weight|(qkv|Wqkv|to_qkv|qkv_proj|in_proj|c_attn)\.weight)$")
_CROSS = re.compile(r"cross|encoder_attn|EncDec", re.IGNORECASE)


@dataclass(frozen=True)
class ParameterRows:
    """A parameter, or some of its rows along one axis.

    Attributes:
        name: name of the parameter in the model.
        rows: the rows, None for all.
        axis: the axis along which they are counted.
    """

    name: str
    rows: Tensor | None = None
    axis: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor shaped like the parameter."""
        return tensor if self.rows is None else tensor.index_select(self.axis, self.rows.to(tensor.device))


@dataclass(frozen=True)
class BlockProjections:
    """The query, key and value maps of one block."""

    query: ParameterRows
    key: ParameterRows
    value: ParameterRows


def find_projections(view: ModelView, config: Any | None) -> dict[tuple[str | None, int], BlockProjections]:
    """Maps stack and layer to projections; blocks whose projections cannot be identified are omitted.

    Uses the family description if there is one, otherwise common parameter names. A module
    that is called in several layers is listed under the first.
    """
    modules = view.modules()
    family = _family(config)
    found: dict[tuple[str | None, int], BlockProjections] = {}
    seen: set[str] = set()
    for stack in view.stacks:
        for call in stack.calls:
            if len(call.blocks) > 1 or call.module_name in seen:
                continue
            seen.add(call.module_name)
            block = modules[call.module_name]
            parts = None if family is None else _by_family(block, call.module_name, family, config)
            parts = parts if parts is not None else _by_name(block, call.module_name)
            if parts is not None:
                found[stack.name, call.first_layer] = parts
    return found


def _family(config: Any | None) -> Family | None:
    if config is None:
        return None
    try:
        return family_of(config)
    except UnsupportedConfigError:
        return None


def _by_family(block: nn.Module, prefix: str, family: Family, config: Any) -> BlockProjections | None:
    names = dict(block.named_parameters(remove_duplicate=False))
    if family.layout in ("separate", "einsum"):
        suffix = ".weight" if family.layout == "separate" else ""
        paths = [f"{path}{suffix}" for path in family.projections]
        return _whole(prefix, paths) if all(path in names for path in paths) else None
    fused = f"{family.projections[0]}.weight"
    if fused not in names:
        return None
    try:
        heads = head_weights(_RowNumbers(block, transposed=family.transposed), config)
    except UnsupportedConfigError:
        return None
    axis = 1 if family.transposed else 0
    cuts = (heads.W_Q, heads.W_K_groups, heads.W_V_groups)
    return BlockProjections(*(ParameterRows(f"{prefix}.{fused}", cut[:, 0, :].flatten().long(), axis) for cut in cuts))


class _RowNumbers(nn.Module):
    """Replaces a block: each matrix contains its own row numbers, so that slices of it show which rows they are."""

    def __init__(self, block: nn.Module, *, transposed: bool) -> None:
        super().__init__()
        self._shapes = {name: p.shape for name, p in block.named_parameters(remove_duplicate=False)}
        self._transposed = transposed

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """The block's parameter names, with row numbers for values."""
        for name, shape in self._shapes.items():
            if len(shape) == 2:
                rows = torch.arange(shape[1 if self._transposed else 0], dtype=torch.float64)
                yield name, rows.expand(shape) if self._transposed else rows[:, None].expand(shape)
            else:
                yield name, torch.zeros(shape, dtype=torch.float64)


def _by_name(block: nn.Module, prefix: str) -> BlockProjections | None:
    parameters = dict(block.named_parameters(remove_duplicate=False))
    own = {name: p for name, p in parameters.items() if not _CROSS.search(name)}
    for words in _SEPARATE:
        for name in own:
            stem = name.removesuffix(f"{words[0]}.weight")
            paths = [f"{stem}{word}.weight" for word in words]
            if stem != name and (not stem or stem.endswith(".")) and all(path in own for path in paths):
                return _whole(prefix, paths)
    return _stacked(own, prefix)


def _stacked(own: Mapping[str, nn.Parameter], prefix: str) -> BlockProjections | None:
    for name, parameter in own.items():
        if _STACKED.search(name) and parameter.dim() == 2 and _is_stacked(name, parameter):
            thirds = torch.arange(parameter.shape[0]).chunk(3)
            return BlockProjections(*(ParameterRows(f"{prefix}.{name}", rows) for rows in thirds))
    return None


def _is_stacked(name: str, parameter: nn.Parameter) -> bool:
    """Whether queries, keys and values are a third of the rows each; ``c_attn`` also names maps stored otherwise."""
    rows, columns = parameter.shape
    return rows % 3 == 0 and ("c_attn" not in name or rows == 3 * columns)


def _whole(prefix: str, paths: list[str]) -> BlockProjections:
    return BlockProjections(*(ParameterRows(f"{prefix}.{path}") for path in paths))


SITE = "attention.weights"
RATIO = "qk_to_v_gradient"


def gradient_values(
    model: nn.Module, projections: Mapping[tuple[str | None, int], BlockProjections]
) -> tuple[LayerValue, ...]:
    r"""Per layer :math:`\|\nabla W_Q\|`, :math:`\|\nabla W_K\|`, :math:`\|\nabla W_V\|` and one ratio of them.

    **Exact.** The ratio is :math:`\sqrt{\|\nabla W_Q\|^2 + \|\nabla W_K\|^2} / \|\nabla W_V\|`: 0 at collapse,
    undefined if the value gradient is zero. A loss scale cancels in the ratio, not in the norms. Parameters without a
    gradient are excluded. Gradients sharded over ranks are gathered, one parameter at a time: all ranks must take part.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: list[LayerValue] = []
    norms: dict[tuple[str | None, int], list[Tensor]] = {}
    for place, parts in projections.items():
        own = [_norm(parameters[part.name], part) for part in (parts.query, parts.key, parts.value)]
        known = [norm for norm in own if norm is not None]
        if len(known) == len(own):
            norms[place] = known
    copied = iter(to_host([norm for own in norms.values() for norm in own]))
    for stack, layer in norms:
        query, key, value = (float(next(copied)) for _ in range(3))
        ratio = math.hypot(query, key) / value if value > 0.0 else math.nan
        named = {"q_gradient": query, "k_gradient": key, "v_gradient": value, RATIO: ratio}
        found += [_row(metric, stack, layer, number) for metric, number in named.items()]
    return tuple(found)


def _row(metric: str, stack: str | None, layer: int, number: float) -> LayerValue:
    if math.isfinite(number):
        return LayerValue(metric, SITE, stack, layer, number, number, number)
    status = Status.UNDEFINED if metric == RATIO else Status.NOT_FINITE
    return LayerValue(metric, SITE, stack, layer, math.nan, math.nan, math.nan, str(status))


def _norm(parameter: nn.Parameter, part: ParameterRows) -> Tensor | None:
    if parameter.grad is None:
        return None
    gradient = part.of(whole(parameter.grad.detach()))
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=widest(gradient.device))
    return norm
