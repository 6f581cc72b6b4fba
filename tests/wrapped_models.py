"""The kinds of wrapped models that the verbs are tried on, each with the plain model it must agree with.

Libraries that are not installed are replaced by modules with the same layout: packed integer buffers with scales and
zero points (GPTQ, AWQ), a Parameter subclass that only its own layer understands (bitsandbytes), a tensor that answers
for its product alone (torchao, quanto), a layer around a layer (PEFT), parameters that are empty between calls
(ZeRO-3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import rankscope as rs

IDS = {"input_ids": torch.arange(2, 18).reshape(2, 8)}
VERBS: dict[str, Callable[[nn.Module], Any]] = {
    "measure": lambda model: rs.measure(model, IDS),
    "ablate": lambda model: rs.ablate(model, IDS, variants=["pure", "full"]),
    "exact": lambda model: rs.exact(model, {"input_ids": IDS["input_ids"][:1]}, rs.Surgery(skip=0.0), plain=False),
    "decompose": lambda model: rs.decompose(model, IDS),
    "bound": lambda model: rs.bound(model, IDS),
    "remedy": lambda model: rs.remedy(model, IDS, remedies=["residual_scale"]),
}


def llama() -> nn.Module:
    """The plain model."""
    return rs.load("init:tiny-llama").model


def with_layers(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """The model with each linear layer replaced."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, make(layer))
    return model


class PackedLinear(nn.Module):
    """Four-bit weights, two to a byte, with a scale and a zero point per group: the layout of GPTQ and AWQ."""

    def __init__(self, layer: nn.Linear, group: int = 16, bits: int = 4) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group = layer.in_features, layer.out_features, group
        grouped = layer.weight.detach().reshape(layer.out_features, -1, group)
        low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
        scales = ((high - low) / (2**bits - 1)).clamp_min(1e-8)
        zeros = (-low / scales).round()
        codes = (grouped / scales + zeros).round().clamp(0, 2**bits - 1).to(torch.uint8).reshape(layer.weight.shape)
        self.register_buffer("qweight", codes[:, 0::2] | (codes[:, 1::2] << 4))
        self.register_buffer("qzeros", zeros)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())

    def dequantised(self) -> Tensor:
        """The reference of the tests; rankscope does not know this method."""
        codes = torch.stack((self.qweight & 15, self.qweight >> 4), -1).flatten(1)
        grouped = codes.float().reshape(self.out_features, -1, self.group)
        return ((grouped - self.qzeros) * self.scales).reshape(self.out_features, -1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dequantised().to(x.dtype), self.bias)


@torch.library.custom_op(
    "rankscope_tests::quantised", mutates_args=(), schema="(Tensor x, Tensor scale, Tensor zero) -> Tensor"
)
def quantised(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (x / scale + zero).round()


class InputQuantisingLinear(PackedLinear):
    """Also rounds its inputs to eight bits, in a kernel of its own, as torchao does: not linear."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
        return super().forward(quantised(x, scale, torch.zeros_like(scale)) * scale)


class Int8Parameter(nn.Parameter):
    """Integers and one scale per row, in a class of its own."""

    scale: Tensor


class SubclassLinear(nn.Linear):
    """A Linear whose weight is a Parameter subclass, as in bitsandbytes and torchao."""

    @classmethod
    def of(cls, layer: nn.Linear) -> SubclassLinear:
        made = cls(layer.in_features, layer.out_features, bias=layer.bias is not None)
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        codes = (layer.weight.detach() / scale).round().to(torch.int8)
        made.weight = torch.Tensor._make_subclass(Int8Parameter, codes)
        made.weight.scale = scale
        made.bias = layer.bias
        return made

    def dequantised(self) -> Tensor:
        return torch.Tensor(self.weight.data.float()) * self.weight.scale

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dequantised().to(x.dtype), self.bias)


class Int8Tensor(Tensor):
    """Integers and scales in a tensor that says it is float, in an ordinary Linear: the layout of torchao, quanto."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Int8Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def swapped_in(cls, layer: nn.Linear) -> nn.Linear:
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        packed = cls((layer.weight.detach() / scale).round().to(torch.int8), scale)
        layer.weight = nn.Parameter(packed, requires_grad=False)
        return layer

    def dequantised(self) -> Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and isinstance(args[1], cls):
            return func(args[0], args[1].dequantised(), *args[2:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} of a packed tensor")


class AdaptedLinear(nn.Module):
    """A low-rank adapter around a layer, with PEFT's names."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = layer
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.lora_A, self.lora_B = nn.Linear(layer.in_features, rank, False), nn.Linear(rank, layer.out_features, False)
        nn.init.normal_(self.lora_A.weight, std=0.2)
        nn.init.normal_(self.lora_B.weight, std=0.2)

    def dequantised(self) -> Tensor:
        return self.base_layer.weight.detach() + self.lora_B.weight.detach() @ self.lora_A.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        return result + self.lora_B(self.lora_A(x))


def _hand_made_twin(model: nn.Module) -> nn.Module:
    """The plain model with the dequantised or merged weights."""
    twin = llama()
    for name, layer in model.named_modules():
        packed = layer if hasattr(layer, "dequantised") else getattr(layer, "weight", None)
        if hasattr(packed, "dequantised"):
            twin.get_submodule(name).weight = nn.Parameter(packed.dequantised())
    return twin


def _compiled_blocks(model: nn.Module) -> nn.Module:
    blocks: Any = model.layers
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, backend="eager")
    return model


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    blocks: Any = model.layers
    blocks[0].compile(backend="eager")
    return model


def _compiled_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return model


def _zero3(model: nn.Module) -> nn.Module:
    """Parameters are empty outside the forward pass of their module, as DeepSpeed keeps them."""

    def gather(module: nn.Module, *_: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = parameter.whole  # type: ignore[attr-defined]

    def release(module: nn.Module, *_: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = torch.empty(0)

    for number, module in enumerate(model.modules()):
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.ds_id, parameter.whole = number, parameter.data  # type: ignore[attr-defined]
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(release)
        release(module)
    return model


def _offloaded(model: nn.Module) -> nn.Module:
    from accelerate import cpu_offload

    return cpu_offload(model)


@torch.library.custom_op(
    "rankscope_tests::flash", mutates_args=(), schema="(Tensor query, Tensor key, Tensor value) -> Tensor"
)
def flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return out.contiguous()


def _custom_operator(model: nn.Module) -> nn.Module:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        return flash(query, key, value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("rankscope_tests", attend)
    AttentionMaskInterface.register("rankscope_tests", sdpa_mask)
    model.set_attn_implementation("rankscope_tests")  # type: ignore[operator]
    return model


@dataclass(frozen=True)
class Wrapped:
    """A kind of wrapped model.

    Attributes:
        title: in the table of the docs.
        wrap: makes one of a plain model.
        twin: the plain model whose values it must have, from the wrapped one; None for the model before wrapping.
        bits: whether the values are equal to the last bit, or to the rounding of float32.
        refused: verbs that refuse it, with a part of the message.
    """

    title: str
    wrap: Callable[[nn.Module], nn.Module]
    twin: Callable[[nn.Module], nn.Module] | None = None
    bits: bool = True
    refused: tuple[tuple[str, str], ...] = ()


def _layers(make: Callable[[nn.Linear], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return with_layers(model, make).eval()

    return wrap


_ABSENT_VERBS = ("exact", "decompose", "bound", "remedy")
_LINEAR = "not linear in its input"
WRAPPED = {
    "compiled": Wrapped("`torch.compile(model)`", lambda model: torch.compile(model, backend="eager")),
    "compiled in place": Wrapped("`model.compile()`, `block.compile()`", _compiled_in_place),
    "compiled blocks": Wrapped("`layers[i] = torch.compile(layers[i])`", _compiled_blocks),
    "compiled forward": Wrapped("`model.forward = torch.compile(model.forward)`", _compiled_forward),
    "packed": Wrapped("weights packed in integers (GPTQ, AWQ layout)", _layers(PackedLinear), _hand_made_twin, False),
    "subclass": Wrapped(
        "weights in a Parameter subclass (bitsandbytes)", _layers(SubclassLinear.of), _hand_made_twin, False
    ),
    "tensor subclass": Wrapped(
        "weights in a tensor subclass (torchao, quanto)", _layers(Int8Tensor.swapped_in), _hand_made_twin, False
    ),
    "inputs quantised too": Wrapped(
        "weights and inputs quantised (LLM.int8(), dynamic int8)",
        _layers(InputQuantisingLinear),
        lambda model: model,
        True,
        (("exact", _LINEAR), ("decompose", _LINEAR), ("bound", _LINEAR)),
    ),
    "adapters": Wrapped("adapters, not merged (LoRA layout)", _layers(AdaptedLinear), _hand_made_twin, False),
    "offloaded": Wrapped(
        "accelerate CPU offload", _offloaded, None, True, tuple((verb, "is offloaded") for verb in _ABSENT_VERBS)
    ),
    "empty": Wrapped(
        "parameters empty between calls (ZeRO-3)",
        _zero3,
        None,
        True,
        tuple((verb, "ZeRO-3") for verb in _ABSENT_VERBS),
    ),
    "custom operator": Wrapped(
        "attention in a custom operator",
        _custom_operator,
        lambda model: llama(),
        False,
        (("decompose", ""), ("bound", "")),
    ),
}
