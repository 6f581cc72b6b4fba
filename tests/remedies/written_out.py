"""Every remedy written out by hand on the small models of the surgery tests: formulas only, no code of the library."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.surgery.written_out import DIM, WIDTH, Attention, Block, Model, split


def forward_under(name: str, s: float, model: Model, x: Tensor) -> Tensor:
    """The model's output under a remedy of strength ``s``."""
    depth = len(model.blocks)
    first: list[Tensor] = []
    for number, block in enumerate(model.blocks):
        x = _block(name, s, block, x, number, depth, first)
    return F.layer_norm(x, (DIM,), model.norm.weight, model.norm.bias, model.norm.eps)


def _block(name: str, s: float, block: Block, x: Tensor, number: int, depth: int, first: list[Tensor]) -> Tensor:
    alpha, beta = (2 * depth) ** (s / 4), (8 * depth) ** (-s / 4)
    on_stream = {"stronger_skip": s, "deepnorm": alpha}.get(name, 1.0)
    on_branch = {"residual_scale": s / math.sqrt(depth), "skipinit": s}.get(name, 1.0)
    on_attention = on_branch * (beta**2 if name == "deepnorm" else 1.0)
    on_weights = beta if name == "deepnorm" else 1.0

    def attention(y: Tensor) -> Tensor:
        return on_attention * attend(name, s, block.attention, y, number, first)

    def mlp(y: Tensor) -> Tensor:
        inner, outer = block.mlp[0], block.mlp[2]
        hidden = F.gelu(F.linear(y, on_weights * inner.weight, inner.bias))
        return on_branch * F.linear(hidden, on_weights * outer.weight, outer.bias)

    if block.kind == "parallel":
        y = block.norm1(x)
        return on_stream * x + attention(y) + mlp(y)
    if block.kind == "pre":
        x = on_stream * x + attention(block.norm1(x))
        return on_stream * x + mlp(block.norm2(x))
    if name == "pre_norm":
        x = x + attention(standardised(x))
        x = x + mlp(standardised(x))
        return block.norm2(x) if number == depth - 1 else x
    x = block.norm1(on_stream * x + attention(x))
    return block.norm2(on_stream * x + mlp(x))


def attend(name: str, s: float, attention: Attention, y: Tensor, number: int, first: list[Tensor]) -> Tensor:
    query, key, value = split(attention, y)
    tokens = y.shape[1]
    if number == 0:
        first.append(value)
    visible = torch.ones(tokens, tokens, dtype=torch.float64)
    seen = visible.tril() if attention.causal else visible
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(WIDTH)
    cosines = torch.einsum("bhqd,bhkd->bhqk", F.normalize(query, dim=-1), F.normalize(key, dim=-1))
    if name == "qk_norm":
        scores = s * math.sqrt(WIDTH) * cosines
    own = soft(scores, seen)
    uniform = seen / seen.sum(dim=-1, keepdim=True)
    identity = torch.eye(tokens, dtype=torch.float64)
    mixed = {
        "value_skipinit": identity + s * own,
        "shaped_attention": identity + s * (own - uniform),
        "centred_attention": own - s * uniform,
    }.get(name, own)
    out = torch.einsum("bhqk,bhkd->bqhd", mixed, value)
    if name == "neutreno":
        out = out + s * (first[0] - value).transpose(1, 2)
    return F.linear(out.reshape(y.shape), attention.weights.out_proj.weight, attention.weights.out_proj.bias)


def soft(scores: Tensor, seen: Tensor) -> Tensor:
    weights = seen * (scores - scores.detach().amax(dim=-1, keepdim=True)).exp()
    return weights / weights.sum(dim=-1, keepdim=True)


def standardised(y: Tensor) -> Tensor:
    centred = y - y.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
