"""The transformer of the playground: an ordinary module with the weights of a design."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rankscope.ext.theory.sampling import ACTIVATIONS, GATED, rotated, rotation
from rankscope.masks import parse_mask
from rankscope.models.design import Design


class Attention(nn.Module):
    """Attention over visible tokens, with rotary or linear positions if the design has them."""

    bias: Tensor | None
    cosines: Tensor
    sines: Tensor

    def __init__(self, design: Design, bias: Tensor | None) -> None:
        super().__init__()
        self.heads, self.rotary = design.heads, design.positions == "rope"
        self.query, self.key, self.value = (_linear(design.width, design.width) for _ in range(3))
        self.out = _linear(design.width, design.width)
        self.register_buffer("bias", bias, persistent=False)
        turns = rotation(design.tokens, design.head_dim) if self.rotary else (None, None)
        for name, table in zip(("cosines", "sines"), turns, strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, x: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        """Apply attention."""
        batch, tokens, dim = x.shape
        query, key, value = (
            part(x).view(batch, tokens, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        if self.rotary:
            tables = self.cosines[:tokens], self.sines[:tokens]
            query, key = rotated(query, *tables), rotated(key, *tables)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        if self.bias is not None:
            scores = scores + self.bias[..., :tokens, :tokens]
        mixed = scores.softmax(dim=-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, dim))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two layers, gated or not."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[GATED.get(design.mlp, design.mlp)]
        self.up, self.down = _linear(design.width, design.mlp_width), _linear(design.mlp_width, design.width)
        self.gate = _linear(design.width, design.mlp_width) if design.mlp in GATED else None

    def forward(self, x: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        """Apply the MLP to each token."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))  # type: ignore[no-any-return]
        return self.down(self.activation(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and, unless the design has none, an MLP, each with its skip and its norm."""

    def __init__(self, design: Design, bias: Tensor | None) -> None:
        super().__init__()
        self.pre, self.post = design.norm_place == "pre", design.norm_place == "post"
        self.skips = (design.attention_skip, design.mlp_skip)
        self.attention = Attention(design, bias)
        self.attention_norm = _norm(design)
        self.mlp = None if design.mlp == "none" else FeedForward(design)
        self.mlp_norm = None if design.mlp == "none" else _norm(design)

    def forward(self, x: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        """Apply the block."""
        x = self._added(x, self.attention, self.attention_norm, self.skips[0])
        if self.mlp is None or self.mlp_norm is None:
            return x
        return self._added(x, self.mlp, self.mlp_norm, self.skips[1])

    def _added(self, x: Tensor, branch: nn.Module, norm: nn.Module, skip: float) -> Tensor:
        out: Tensor = branch(norm(x) if self.pre else x)
        total = out if skip == 0 else (x if skip == 1 else skip * x) + out
        return norm(total) if self.post else total


class Transformer(nn.Module):
    """A stack of blocks whose inputs are vectors rather than token ids.

    Args:
        design: the design to build.
        seed: seed of the weights.
    """

    def __init__(self, design: Design, seed: int) -> None:
        super().__init__()
        bias = _bias(design)
        self.blocks = nn.ModuleList(Block(design, bias) for _ in range(design.depth))
        self.double().requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        stds = {
            "query": design.query_std,
            "key": design.key_std,
            "value": design.value_std,
            "out": design.output_std,
            "up": design.mlp_in_std,
            "gate": design.mlp_in_std,
            "down": design.mlp_out_std,
        }
        for name, weight in self.named_parameters():
            weight.normal_(std=stds[name.split(".")[-2]], generator=generator)

    def forward(self, x: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        """Apply all blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def first_tokens(design: Design, seed: int) -> Float[Tensor, "one tokens dim"]:
    """Gaussian tokens with the design's ``embedding_std``; learned positions add a second vector of the same law."""
    generator = torch.Generator().manual_seed(seed ^ 0x5EED)
    shape = (1, design.tokens, design.width)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    if design.positions == "learned":
        x = (x + torch.randn(shape, dtype=torch.float64, generator=generator)) / math.sqrt(2)
    return x * design.embedding_std


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _norm(design: Design) -> nn.Module:
    if design.norm == "layernorm":
        return nn.LayerNorm(design.width, eps=design.norm_eps, elementwise_affine=False)
    if design.norm == "rmsnorm":
        return nn.RMSNorm(design.width, eps=design.norm_eps, elementwise_affine=False)
    return nn.Identity()


def _bias(design: Design) -> Tensor | None:
    """The bias added to the scores: minus infinity for hidden keys, and ALiBi's slopes."""
    visible = parse_mask(design.mask).dense(design.tokens)
    hidden = None if bool(visible.all()) else torch.where(visible, 0.0, -math.inf).double()
    if design.positions != "alibi":
        return hidden
    slopes = 2.0 ** (-8 * torch.arange(1, design.heads + 1, dtype=torch.float64) / design.heads)
    place = torch.arange(design.tokens, dtype=torch.float64)
    alibi = -slopes[:, None, None] * (place[:, None] - place).abs()
    return alibi if hidden is None else alibi + hidden
