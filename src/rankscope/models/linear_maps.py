"""The dense weights of linear layers, however a library stores them: quantised, with adapters, parametrised.

A layer that holds nothing but a dense weight and a bias is read as it is. Any other layer is asked what it does: its
own forward pass, applied to the unit vectors, returns the columns of its matrix. This is the library's own
dequantisation, for every library and layout, and one product with random vectors shows whether the layer is linear at
all: layers that also quantise their inputs are not, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import UnsupportedConfigError
from rankscope.models.wrapping import is_distributed

_ROWS_AT_ONCE = 512
_ACTIVATIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ROUNDINGS = 64


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A linear layer as a dense matrix.

    Attributes:
        weight: (out, in).
        bias: (out,), None without one.
    """

    weight: Tensor
    bias: Tensor | None


def is_plain(module: nn.Module) -> bool:
    """Whether a layer holds a dense weight, perhaps a bias, and nothing else that could change what it computes."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return "weight" in held and set(held) <= {"weight", "bias"} and not any(map(_is_packed, held.values()))


def _is_packed(tensor: Tensor | None) -> bool:
    """Whether a tensor is in a format that only the library that made it can compute with."""
    if tensor is None:
        return False
    foreign = type(tensor) is not Tensor and type(tensor).__module__.partition(".")[0] != "torch"
    return foreign or not tensor.is_floating_point()


def linear_at(block: nn.Module, path: str, *, transposed: bool = False) -> LinearMap | None:
    """The linear layer at a path inside a block; None if there is none.

    Args:
        block: the block, or a bare module that has only its parameters.
        path: of the layer, without ``.weight``.
        transposed: plain layers of this kind store their weight as (in, out).
    """
    try:
        module = block.get_submodule(path)
    except AttributeError:
        held = dict(block.named_parameters(remove_duplicate=False))
        return _as_stored(path, held.get(f"{path}.weight"), held.get(f"{path}.bias"), transposed)
    return linear_map(module, path, transposed=transposed)


def _as_stored(name: str, weight: Tensor | None, bias: Tensor | None, transposed: bool) -> LinearMap | None:
    if weight is None:
        return None
    absent = absence_of(weight)
    if absent is not None:
        raise UnsupportedConfigError(f"The weight of {name} cannot be read: it {absent}.")
    return LinearMap(weight.detach().T if transposed else weight.detach(), None if bias is None else bias.detach())


def absence_of(parameter: Tensor) -> str | None:
    """Why the values of a parameter are not in this process outside a forward pass, in words; None if they are."""
    if is_distributed(parameter):
        return "is sharded over processes (DTensor, as fully_shard and tensor parallelism make it)"
    if hasattr(parameter, "ds_id") and parameter.numel() == 0:
        return "is empty outside the forward pass of its module (DeepSpeed ZeRO-3)"
    if parameter.is_meta:
        return "is offloaded (device_map): it is on the meta device until its module runs"
    if parameter.numel() == 0:
        return "is empty: its values are elsewhere until its module runs"
    return None


def linear_map(module: nn.Module, name: str, *, transposed: bool = False) -> LinearMap:
    """The dense matrix of a linear layer.

    Args:
        module: the layer.
        name: what to call it in an error.
        transposed: a plain layer of this kind stores its weight as (in, out).

    Raises:
        UnsupportedConfigError: the layer is not linear in its input, or cannot be run on its own.
    """
    if is_plain(module):
        stored = _as_stored(name, module._parameters["weight"], module._parameters.get("bias"), transposed)
        assert stored is not None
        return stored
    return _by_its_action(module, name)


def _by_its_action(module: nn.Module, name: str) -> LinearMap:
    words = f"{name} ({type(module).__module__.partition('.')[0]} {type(module).__name__})"
    width = getattr(module, "in_features", None)
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if not isinstance(width, int):
        stored = ", ".join(list(held)[:5]) or "no tensors"
        raise UnsupportedConfigError(
            f"The weights of {words} cannot be read: it holds {stored} instead of one weight, and no in_features."
        )
    absent = next((why for tensor in held.values() if (why := absence_of(tensor)) is not None), None)
    if absent is not None:
        raise UnsupportedConfigError(f"The weights of {words} cannot be read: a part of them {absent}.")
    dtypes = [tensor.dtype for tensor in held.values() if not _is_packed(tensor) and tensor.dtype in _ACTIVATIONS]
    device = next((tensor.device for tensor in held.values()), torch.device("cpu"))
    like = torch.empty(0, dtype=dtypes[0] if dtypes else torch.float32, device=device)
    try:
        with torch.no_grad():
            with _without_biases(module):
                eye = torch.eye(width, dtype=like.dtype, device=like.device)
                columns = torch.cat([_applied(module, part) for part in torch.split(eye, _ROWS_AT_ONCE)])
            zero = _applied(module, like.new_zeros(1, width))[0]
            sample = torch.randn(8, width, generator=torch.Generator().manual_seed(0)).to(like)
            seen = _applied(module, sample)
    except Exception as error:
        raise UnsupportedConfigError(
            f"The weights of {words} cannot be read: the layer failed on unit vectors "
            f"({type(error).__name__}: {str(error)[:200]})."
        ) from error
    expected = sample.cpu().double() @ columns.cpu().double() + zero.cpu().double()
    scale = torch.linalg.vector_norm(expected - zero.cpu().double())
    departs = float(torch.linalg.vector_norm(seen.cpu().double() - expected) / scale) if float(scale) else 0.0
    eps = torch.finfo(seen.dtype).eps
    if not departs <= (_ROUNDINGS * eps if eps < 1e-5 else eps / 2):
        raise UnsupportedConfigError(
            f"{words} is not linear in its input: its output departs by {departs:.1e} from that of the matrix it "
            "applies to unit vectors. It quantises or rounds its inputs too, so its weights alone do not describe it. "
            "Quantise the weights only, or pass the model before quantisation; measure and ablate accept it as it is."
        )
    return LinearMap(columns.T, zero if bool(zero.any()) else None)


def _applied(module: nn.Module, x: Tensor) -> Tensor:
    """The forward pass of a layer with those hooks that are its own methods: some quantise inputs or outputs in them.

    Hooks of others, such as those that record this pass, are left out.
    """
    for before in _own(module, module._forward_pre_hooks):
        changed = before(module, (x,))
        x = x if changed is None else changed[0] if isinstance(changed, tuple) else changed
    out: Any = module.forward(x)
    for after in _own(module, module._forward_hooks):
        changed = after(module, (x,), out)
        out = out if changed is None else changed
    dense: Tensor = out.dequantize() if _is_packed(out) and hasattr(out, "dequantize") else out
    return dense


def _own(module: nn.Module, hooks: Mapping[int, Callable[..., Any]]) -> list[Callable[..., Any]]:
    return [hook for hook in hooks.values() if getattr(hook, "__self__", None) is module]


@contextmanager
def _without_biases(module: nn.Module) -> Iterator[None]:
    """Take the biases out meanwhile: subtracting them from the output would round it."""
    slots: list[tuple[dict[str, Any], Tensor]] = [
        (held, bias)
        for part in module.modules()
        for held in (part._parameters, part._buffers)
        if (bias := held.get("bias")) is not None
    ]
    try:
        for held, _ in slots:
            held["bias"] = None
        yield
    finally:
        for held, bias in slots:
            held["bias"] = bias


@contextmanager
def dense(model: nn.Module) -> Iterator[None]:
    """Put dense linear layers in the places of packed and adapted ones; the originals are restored afterwards.

    Raises:
        UnsupportedConfigError: a layer has no dense equal, or something else is packed, such as an embedding.
    """
    for name, module in model.named_modules():
        if any(map(_is_packed, module._parameters.values())) and not _is_linear(module):
            raise UnsupportedConfigError(
                f"{name or 'The model'} ({type(module).__name__}) is stored in a packed format, and is not a linear "
                "layer that could be read as a dense one. Pass the model with this part in float; measure and ablate "
                "accept it as it is."
            )
    with _replaced(model, lambda layer, name: _plain_layer(linear_map(layer, name), layer)):
        yield


@contextmanager
def adapters_merged(module: nn.Module) -> Iterator[None]:
    """Put one linear layer in the place of each layer with an adapter, so that its inner sums are not taken for skips.

    Layers that are not linear stay as they are.
    """

    def merged(layer: nn.Module, name: str) -> nn.Module:
        try:
            return _plain_layer(linear_map(layer, name), layer) if has_adapter(layer) else layer
        except UnsupportedConfigError:
            return layer

    with _replaced(module, merged):
        yield


@contextmanager
def _replaced(module: nn.Module, replacement: Callable[[nn.Module, str], nn.Module]) -> Iterator[None]:
    """Replace the outermost linear layers that are packed or have an adapter."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    known: dict[int, nn.Module] = {}  # a layer may stand in several places

    def walk(module: nn.Module, prefix: str) -> None:
        for key, child in list(module._modules.items()):
            name = f"{prefix}{key}"
            if child is None:
                continue
            if not _is_linear(child) or not (has_adapter(child) or _holds_packed(child)):
                walk(child, f"{name}.")
                continue
            if id(child) not in known:
                known[id(child)] = replacement(child, name)
            replaced.append((module, key, child))
            module._modules[key] = known[id(child)]

    try:
        walk(module, "")
        yield
    finally:
        for parent, key, child in replaced:
            parent._modules[key] = child


def _is_linear(module: nn.Module) -> bool:
    return isinstance(getattr(module, "in_features", None), int) and "Embedding" not in type(module).__name__


def has_adapter(module: nn.Module) -> bool:
    """Whether an adapter stands around this layer; PEFT calls the layer itself ``base_layer``."""
    return "base_layer" in module._modules


def is_packed_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer that stores its weight in a format of its own."""
    return _is_linear(module) and _holds_packed(module)


def _holds_packed(module: nn.Module) -> bool:
    return any(map(_is_packed, (*module.parameters(), *module.buffers())))


def _plain_layer(found: LinearMap, like: nn.Module) -> nn.Linear:
    layer = nn.Linear(found.weight.shape[1], found.weight.shape[0], bias=found.bias is not None, device="meta")
    layer.weight = nn.Parameter(found.weight.contiguous(), requires_grad=False)
    if found.bias is not None:
        layer.bias = nn.Parameter(found.bias, requires_grad=False)
    return layer.train(like.training)
