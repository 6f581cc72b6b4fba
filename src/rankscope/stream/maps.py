"""What kind of map each operation of a pass is: what it passes on of its inputs, and what it only is steered by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rankscope.pass_graph.ir import Node, Value
from rankscope.stream.operators import NORMS

Kind = Literal["carries", "scales", "bends", "matrix", "mixes"]

_LINEAR = {"add", "sub", "rsub", "neg", "lerp", "where", "masked_fill", "clone", "copy", "positive"}
_ELEMENTWISE = {"hardswish", "prelu", "_prelu_kernel", "log_sigmoid_forward", "glu", "rrelu_with_noise", "floor_divide"}
"""Elementwise functions that torch does not mark as such."""
_PRODUCTS = {"mul", "div", "true_divide"}
_CARRYING = {
    "_to_copy", "_unsafe_view", "_reshape_alias", "cat", "stack", "repeat", "roll", "flip", "rot90", "constant_pad_nd",
    "pad", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "index", "_unsafe_index", "index_select",
    "gather", "take_along_dim", "index_put", "_unsafe_index_put", "index_copy", "index_add", "index_fill", "scatter",
    "scatter_add", "scatter_reduce", "select_scatter", "slice_scatter", "diagonal_scatter", "as_strided_scatter",
    "masked_select", "masked_scatter", "copy", "native_layer_norm", "_fused_rms_norm", "rms_norm", "native_group_norm",
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
    "native_dropout", "avg_pool1d", "avg_pool2d", "_adaptive_avg_pool2d", "max_pool2d_with_indices",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_bicubic2d",
    "repeat_interleave", "tril", "triu", "resize_", "set_", "lift_fresh", "_conj", "view_as_real", "view_as_complex",
    "addcmul", "addcdiv", "split_with_sizes_copy", "unbind_copy", "bernoulli", "shared memory",
}  # fmt: skip
_STATISTICS = {
    "mean", "sum", "amax", "amin", "var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm", "prod",
}  # fmt: skip
_SORTED = {"max", "min", "topk", "sort", "median", "kthvalue", "logsumexp", "argmax", "argmin", "argsort"}
_MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "linear", "mv", "addmv", "matmul"}
_CONVOLUTIONS = {"convolution", "_convolution", "mkldnn_convolution"}
_ADDED_PRODUCTS = {"addmm", "baddbmm", "addbmm", "addmv"}
_CONDITIONED = {"where": 0, "masked_fill": 1, "masked_scatter": 1, "masked_select": 1}
"""Operations with an argument that only selects, and its position."""
_INDEXED = {
    "index", "_unsafe_index", "index_put", "_unsafe_index_put", "index_select", "gather", "index_add", "index_copy",
    "index_fill", "scatter", "scatter_add", "scatter_reduce", "take_along_dim",
}  # fmt: skip
"""Operations with integer tensors among their arguments, which only select."""
_LAYERS = {torch.nn.functional.linear, torch.addmm}
"""Functions that are a product with a matrix, whatever they are executed as."""


@dataclass(frozen=True)
class Map:
    """What one operation does to its inputs.

    Attributes:
        kind: ``carries`` passes them on unchanged, up to a sum, a view, a norm, a selection. ``scales`` is a product of
            tensors, ``bends`` a nonlinear elementwise function, ``matrix`` a product with a matrix. ``mixes`` is
            anything else, in particular everything that mixes tokens.
        carried: inputs that are passed on.
        read: inputs that only control it: broadcast gains, conditions, and what is added to a product.
        is_statistic: whether it is one number per token, such as a mean over channels.
        merges: whether carried values end up in the same entries, by a sum or by a selection.
        reduces: whether it sums over tokens or over streams stored side by side.
        in_norm: whether it happened inside a recognised norm.
        beside: length of the axis along which it puts its inputs side by side, if that is not the last; else 0.
        contracts: length of the axis over which a matrix product or a convolution sums; else 0.
    """

    kind: Kind
    carried: tuple[Value, ...]
    read: tuple[Value, ...]
    is_statistic: bool
    merges: bool
    reduces: bool
    in_norm: bool
    beside: int
    contracts: int


def map_of(node: Node) -> Map:
    """What an operation does to its inputs."""
    name = node.name
    if node.function is not None and node.function.func in _LAYERS and name in _INDEXED:
        name = "linear"  # weights that are not in memory are stood in for by a choice of channels
    kind, carried, read, is_statistic = _kind(node, name)
    merges = _merges(node, name)
    in_norm = node.function is not None and node.function.func in NORMS
    return Map(
        kind,
        carried,
        read,
        is_statistic,
        merges,
        reduces=name in _STATISTICS and not is_statistic,
        in_norm=in_norm or (node.call is not None and node.call.is_in_norm),
        beside=0 if merges or name != "cat" else node.outputs[0].shape[_axis_of_cat(node)],
        contracts=_contracted(node, name),
    )


def _kind(node: Node, name: str) -> tuple[Kind, tuple[Value, ...], tuple[Value, ...], bool]:
    """What an operation does, which values it carries, which only control it, and whether it is a statistic."""
    given = node.inputs
    content = tuple(value for value in given if value.dtype.is_floating_point or value.dtype.is_complex)
    if node.is_opaque:
        return "mixes", content, tuple(value for value in given if value not in content), False
    # A mean over channels is one number per token (a norm computes it); over tokens it mixes them.
    if name in _STATISTICS:
        light = _is_over_channels(node)
        return ("bends" if light else "mixes"), given, (), light
    if name in _SORTED:
        light = _is_over_channels(node) or (name in ("topk", "sort") and len(node.args) < 3)
        return ("bends" if light else "mixes"), given, (), False
    if name in _MATRIX_PRODUCTS:
        # addmm(c, a, b) = c + a b: the first argument is added, not multiplied.
        added = int(name in _ADDED_PRODUCTS)
        return "matrix", given[added:], given[:added], False
    if name in _CONVOLUTIONS:
        is_pointwise = all(length == 1 for length in given[1].shape[2:])
        return ("matrix" if is_pointwise else "mixes"), given, (), False
    if name in _PRODUCTS:
        # A factor of the full shape is carried (the stream, or a gate of its size); a broadcast one is a gain.
        carried = tuple(value for value in given if value.shape == node.outputs[0].shape)
        return "scales", carried, tuple(value for value in given if value not in carried), False
    if name in _CONDITIONED:
        position = _CONDITIONED[name]
        return "carries", given[:position] + given[position + 1 :], given[position : position + 1], False
    if name in _INDEXED:
        return "carries", content, tuple(value for value in given if value not in content), False
    if name in _CARRYING or name in _LINEAR or (node.operator is not None and node.operator.is_view):
        return "carries", given, (), False
    if name in _ELEMENTWISE or (node.operator is not None and torch.Tag.pointwise in node.operator.tags):
        return "bends", given, (), False
    return "mixes", given, (), False


def _merges(node: Node, name: str) -> bool:
    """Whether values end up in the same entries; tensors concatenated along the tokens do not."""
    if name == "cat":
        return not node.inputs or _axis_of_cat(node) == len(node.inputs[-1].shape) - 1
    return name not in _PRODUCTS


def _axis_of_cat(node: Node) -> int:
    return int(node.args[1] if len(node.args) > 1 else 0) % max(1, len(node.inputs[-1].shape))


def _contracted(node: Node, name: str) -> int:
    """Length of the axis over which a product with a matrix sums; channels come second in a convolution."""
    if name in _CONVOLUTIONS:
        return node.inputs[0].shape[1]
    return node.inputs[int(name in _ADDED_PRODUCTS)].shape[-1] if name in _MATRIX_PRODUCTS else 0


def _is_over_channels(node: Node) -> bool:
    """Whether a sum, a mean, ... is over the last axis only."""
    given: Sequence[Any] = node.args[1:]
    dims = next((arg for arg in given if isinstance(arg, (list, tuple))), None)
    if dims is None:
        dims = [arg for arg in given if isinstance(arg, int) and not isinstance(arg, bool)][-1:]
    ndim = len(node.inputs[0].shape) if node.inputs else 0
    return ndim > 1 and len(dims) == 1 and dims[0] % ndim == ndim - 1
