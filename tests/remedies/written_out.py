"""Every remedy written out by hand on the small models of the surgery tests: formulas only, no code of the library."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.surgery.written_out import DIM, HEADS, WIDTH, Attention, Block, Model, split


def forward_under(name: str, s: float, model: Model, x: Tensor, gates: Mapping[int, Tensor] | None = None) -> Tensor:
    """The model's output under a remedy of strength ``s``."""
    depth = len(model.blocks)
    first: list[Tensor] = []
    for number, block in enumerate(model.blocks):
        gate = None if gates is None else gates[number]
        x = _block(name, s, block, x, number, depth, first, gate)
    return F.layer_norm(x, (DIM,), model.norm.weight, model.norm.bias, model.norm.eps)


def _block(
    name: str, s: float, block: Block, x: Tensor, number: int, depth: int, first: list[Tensor], gate: Tensor | None
) -> Tensor:
    alpha, beta = (2 * depth) ** (s / 4), (8 * depth) ** (-s / 4)
    on_stream = {"stronger_skip": s, "deepnorm": alpha, "highway_skip": 2 * depth * s}.get(name, 1.0)
    on_branch = {"residual_scale": s / math.sqrt(depth), "skipinit": s}.get(name, 1.0)
    on_attention = on_branch * (beta**2 if name == "deepnorm" else 1.0)
    on_weights = beta if name == "deepnorm" else 1.0
    on_norm = 1 / math.sqrt(number + 1) ** s if name == "layernorm_scaling" else 1.0

    def norm1(y: Tensor) -> Tensor:
        return on_norm * block.norm1(y)

    def norm2(y: Tensor) -> Tensor:
        return on_norm * block.norm2(y)

    def read(y: Tensor) -> Tensor:
        return standardised(y) if name == "highway_skip" else y

    def added(y: Tensor) -> Tensor:
        return s * y / y.square().mean(dim=-1, keepdim=True).sqrt() if name == "peri_ln" else y

    def attention(y: Tensor) -> Tensor:
        return added(on_attention * attend(name, s, block.attention, read(y), number, first, gate))

    def mlp(y: Tensor) -> Tensor:
        inner, outer = block.mlp[0], block.mlp[2]
        hidden = F.gelu(F.linear(read(y), on_weights * inner.weight, inner.bias))
        return added(on_branch * F.linear(hidden, on_weights * outer.weight, outer.bias))

    def pushed(y: Tensor) -> Tensor:
        return contrasted(y, s, block.attention.causal) if name == "contranorm" else y

    if block.kind == "parallel":
        y = norm1(x)
        return pushed(on_stream * x + attention(y) + mlp(y))
    if block.kind == "pre":
        x = on_stream * x + attention(norm1(x))
        return pushed(on_stream * x + mlp(norm2(x)))
    if name == "pre_norm":
        x = x + attention(standardised(x))
        x = x + mlp(standardised(x))
        return norm2(x) if number == depth - 1 else x
    x = norm1(on_stream * x + attention(x))
    return norm2(pushed(on_stream * x + mlp(x)))


def attend(
    name: str, s: float, attention: Attention, y: Tensor, number: int, first: list[Tensor], gate: Tensor | None
) -> Tensor:
    query, key, value = split(attention, y)
    tokens = y.shape[1]
    if name == "value_residual" and number > 0:
        value = (1 - s) * value + s * first[0]
    if number == 0:
        first.append(value)
    seen = torch.tensor(
        [
            [(j <= i or not attention.causal) and (name != "local_mask" or abs(i - j) <= s) for j in range(tokens)]
            for i in range(tokens)
        ]
    ).double()
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(WIDTH)
    cosines = torch.einsum("bhqd,bhkd->bhqk", F.normalize(query, dim=-1), F.normalize(key, dim=-1))
    keys = seen.sum(dim=-1, keepdim=True)
    if name == "log_n_scale":
        scores = scores * s * keys.log()
    if name == "qk_norm":
        scores = s * math.sqrt(WIDTH) * cosines
    if name == "critical_temperature":
        scores = s * (2 * keys.log()).sqrt() * math.sqrt(WIDTH) * cosines
    if name == "logit_softcap":
        scores = s * (scores / s).tanh()
    own = soft(scores, seen)
    if name == "differential_attention":
        halves = [
            torch.einsum("bhqd,bhkd->bhqk", query[..., part], key[..., part]) / math.sqrt(WIDTH / 2)
            for part in (slice(0, WIDTH // 2), slice(WIDTH // 2, WIDTH))
        ]
        initial = 0.8 - 0.6 * math.exp(-0.3 * number)
        own = soft(halves[0], seen) - s * initial * soft(halves[1], seen)
    uniform = seen / seen.sum(dim=-1, keepdim=True)
    identity = torch.eye(tokens, dtype=torch.float64)
    mixed = {
        "value_skipinit": identity + s * own,
        "shaped_attention": identity + s * (own - uniform),
        "centred_attention": own - s * uniform,
        "attn_scale": uniform + (1 + s) * (own - uniform),
    }.get(name, own)
    out = torch.einsum("bhqk,bhkd->bqhd", mixed, value)
    if name == "neutreno":
        out = out + s * (first[0] - value).transpose(1, 2)
    if name == "differential_attention":
        out = (1 - initial) * out / out.square().mean(dim=-1, keepdim=True).sqrt()
    if name == "attention_out_norm":
        joint = out.reshape(y.shape)
        joint = joint - joint.mean(dim=-1, keepdim=True)
        out = s * joint / joint.square().mean(dim=-1, keepdim=True).sqrt()
    if gate is not None:
        out = out * (1 / (1 + (-(y @ gate)).exp())).reshape(*y.shape[:2], HEADS, WIDTH)
    return F.linear(out.reshape(y.shape), attention.weights.out_proj.weight, attention.weights.out_proj.bias)


def soft(scores: Tensor, seen: Tensor) -> Tensor:
    weights = seen * (scores - scores.detach().amax(dim=-1, keepdim=True)).exp()
    return weights / weights.sum(dim=-1, keepdim=True)


def standardised(y: Tensor) -> Tensor:
    centred = y - y.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()


def contrasted(y: Tensor, s: float, causal: bool) -> Tensor:
    unit = y / y.square().sum(dim=-1, keepdim=True).sqrt()
    rows = []
    for i in range(y.shape[1]):
        among = range(i + 1) if causal else range(y.shape[1])
        weights = torch.stack([(unit[:, i] * unit[:, j]).sum(dim=-1).exp() for j in among], dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        rows.append(y[:, i] - s * sum(weights[:, k, None] * y[:, j] for k, j in enumerate(among)))
    return torch.stack(rows, dim=1)
