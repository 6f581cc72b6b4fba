"""Models trained in their cut form: the gradients are those of the cut written out by hand, and training goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope import Surgery
from rankscope.surgery.operating import operate
from tests.own_models import GPT, ids

STEPS = 50


def bert(depth: int = 6) -> nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=depth, num_attention_heads=4, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False).double().train()


def mix(x: Tensor, query: nn.Module, key: nn.Module, value: nn.Module, causal: bool) -> Tensor:
    """Four heads of softmax attention, before the output projection."""
    heads = [part(x).unflatten(-1, (4, -1)) for part in (query, key, value)]
    scores = torch.einsum("bqhd,bkhd->bhqk", heads[0], heads[1]) / math.sqrt(heads[0].shape[-1])
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), heads[2]).flatten(-2)


def cut_bert(model: Any, tokens: Tensor) -> Tensor:
    """Post-norm, no skips, no MLP: norm(norm(attention(x)))."""
    x = model.embeddings(tokens)
    for layer in model.encoder.layer:
        own, out = layer.attention.self, layer.attention.output
        x = out.LayerNorm(out.dense(mix(x, own.query, own.key, own.value, causal=False)))
        x = layer.output.LayerNorm(x)
    return x


def cut_gpt(model: GPT, tokens: Tensor) -> Tensor:
    """Pre-norm, no attention skip, half the MLP's."""
    x = model.embed(tokens) + model.positions[: tokens.shape[1]]
    for block in model.blocks:
        weight, bias = block.attention.qkv.weight.split(32), block.attention.qkv.bias.split(32)
        projections = [lambda y, w=w, b=b: F.linear(y, w, b) for w, b in zip(weight, bias, strict=True)]
        x = block.attention.out(mix(block.norm1(x), *projections, causal=True))
        x = 0.5 * x + block.mlp(block.norm2(x))
    return model.head(model.norm(x))


def losses(model: nn.Module, forward: Callable[[], Tensor], steps: int) -> tuple[list[float], list[Tensor]]:
    """Losses of a short training run, and the gradients of its first step."""
    with torch.no_grad():
        width = forward().shape[-1]
    target = torch.randn(4, 8, width, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen, first = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = (forward() - target).square().mean()
        loss.backward()
        if step == 0:
            first = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        seen.append(loss.item())
    return seen, first


def assert_trains(build: Callable[[], nn.Module], by_hand: Callable[[Any, Tensor], Tensor], **operation: Any) -> None:
    tokens = ids(4, 8)
    model, twin = build(), build()
    twin.load_state_dict(model.state_dict())
    with operate(model, Surgery(**operation), inputs=tokens):
        seen, gradients = losses(model, lambda: first_output(model(tokens)), STEPS)
    wanted, by_hand_gradients = losses(twin, lambda: by_hand(twin, tokens), STEPS)
    scale = max(float(g.abs().max()) for g in by_hand_gradients)
    for got, want in zip(gradients, by_hand_gradients, strict=True):
        assert float((got - want).abs().max()) <= 1e-10 * scale
    assert all(math.isfinite(loss) for loss in seen)
    assert seen[-1] < 0.99 * seen[0]
    assert abs(seen[0] - wanted[0]) <= 1e-12 * wanted[0]
    assert abs(seen[-1] - wanted[-1]) <= 1e-6 * wanted[-1]


def first_output(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def test_bert_as_pure_attention_trains() -> None:
    assert_trains(bert, cut_bert, skip=0.0, mlp="drop")


def test_a_hand_written_gpt_with_half_its_skips_trains() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return GPT("pre", depth=6).double().train()

    assert_trains(build, cut_gpt, attention_skip=0.0, mlp_skip=0.5)
