"""The networks of the grammar as plain torch modules, written as users write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reference.grammar import ROTARY_BASE, Network


class Attention(nn.Module):
    """Softmax attention with the masks, sinks, caps and rotations of the grammar."""

    def __init__(self, network: Network, weights: dict[str, Tensor], visible: Tensor) -> None:
        super().__init__()
        self.network = network
        self.q, self.k, self.v, self.o = (_linear(weights, name) for name in ("q", "k", "v", "o"))
        self.sink = nn.Parameter(weights["sink"].clone())
        self.register_buffer("visible", visible)
        cos, sin = rotations(network)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        net = self.network
        q, k, v = (self._heads(project(x)) for project in (self.q, self.k, self.v))
        if net.rotary:
            q, k = self._rotated(q), self._rotated(k)
        mask = None if net.mask == "complete" else self.visible
        if net.fused and not net.sinks and not net.cap:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=net.scale)
        else:
            scores = q @ k.transpose(-1, -2) * net.scale
            if net.cap:
                scores = net.cap * torch.tanh(scores / net.cap)
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            if net.sinks:
                column = self.sink.view(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[1], 1)
                mixed = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1] @ v
            else:
                mixed = scores.softmax(dim=-1) @ v
        return self.o(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.network.heads, -1).transpose(1, 2)

    def _rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin


class Mlp(nn.Module):
    """Two layers with an activation between them, or a gated one."""

    def __init__(self, network: Network, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.kind = network.activation
        self.up, self.down = _linear(weights, "up"), _linear(weights, "down")
        self.gate = nn.Parameter(weights["gate"].clone())

    def forward(self, x: Tensor) -> Tensor:
        """Each token by itself."""
        up = self.up(x)
        if self.kind == "swiglu":
            return self.down(F.silu(F.linear(x, self.gate)) * up)
        if self.kind == "gelu_tanh":
            return self.down(F.gelu(up, approximate="tanh"))
        return self.down({"relu": F.relu, "gelu": F.gelu, "silu": F.silu}[self.kind](up))


class Block(nn.Module):
    """Attention, then perhaps an MLP."""

    def __init__(self, network: Network, weights: dict[str, Tensor], visible: Tensor) -> None:
        super().__init__()
        self.skip, self.placement = network.skip, network.placement
        self.attention = Attention(network, weights, visible)
        self.mlp = Mlp(network, weights) if network.activation != "none" else None
        self.norm1, self.norm2 = (_norm(network, weights, name) for name in ("norm1", "norm2"))

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        x = self._around(x, self.attention, self.norm1)
        return x if self.mlp is None else self._around(x, self.mlp, self.norm2)

    def _around(self, x: Tensor, branch: nn.Module, norm: nn.Module) -> Tensor:
        y = branch(norm(x) if self.placement == "pre" else x)
        if self.skip in ("cut", "kept"):
            y = x + y
        elif self.skip == "gain":
            y = 0.5 * x + y
        return norm(y) if self.placement == "post" else y


class Toy(nn.Module):
    """A stack of blocks on given embeddings."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        parts = zip(network.weights, network.visible, strict=True)
        self.blocks = nn.ModuleList(Block(network, weights, visible) for weights, visible in parts)

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        """Through every block."""
        for block in self.blocks:
            inputs_embeds = block(inputs_embeds)
        return inputs_embeds


def rotations(network: Network) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position and channel, rounded once: both programs take these numbers as given."""
    half = network.head_width // 2
    angles = torch.outer(
        torch.arange(network.tokens, dtype=torch.float64),
        ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64) / half),
    ).repeat(1, 2)
    return angles.cos().to(network.format), angles.sin().to(network.format)


def _linear(weights: dict[str, Tensor], name: str) -> nn.Linear:
    weight, bias = weights[name], weights[f"{name}.bias"]
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(bias.any()), dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.clone())
    if layer.bias is not None:
        layer.bias = nn.Parameter(bias.clone())
    return layer


def _norm(network: Network, weights: dict[str, Tensor], name: str) -> nn.Module:
    if network.norm == "none":
        return nn.Identity()
    if network.norm == "layer":
        norm: nn.Module = nn.LayerNorm(network.width, eps=1e-5, dtype=network.format)
        norm.bias = nn.Parameter(weights[f"{name}.bias"].clone())
    else:
        norm = nn.RMSNorm(network.width, eps=1e-6 if network.norm == "rms" else None, dtype=network.format)
    norm.weight = nn.Parameter(weights[name].clone())
    return norm
