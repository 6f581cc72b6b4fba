"""An operation as a value, and what a fused kernel makes of one under dropout."""

from __future__ import annotations

import json
from dataclasses import fields

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rankscope import Surgery
from rankscope.masks import parse_mask
from rankscope.surgery.attention_edits import joint_mixture, mixed_probs
from rankscope.surgery.graft import Mixture
from rankscope.surgery.operating import operate
from rankscope.surgery.operation import Operation


def test_dropout_loses_the_same_entries_of_p_and_of_the_uniform_matrix() -> None:
    """P - U under dropout, on a fused kernel, is a matrix that keeps each entry of P - U or loses it."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([self.Layer()])

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.query = nn.Linear(8, 8)
                self.mlp = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                query = self.query(x).unsqueeze(1)
                identity = torch.eye(8, dtype=x.dtype).expand(2, 1, 8, 8)
                x = x + scaled_dot_product_attention(query, x.unsqueeze(1), identity, dropout_p=0.5)[:, 0]
                return x + self.mlp(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    torch.manual_seed(0)
    model, x = One().double(), torch.randn(2, 8, 8, dtype=torch.float64)
    scores = torch.einsum("bqd,bkd->bqk", model.layers[0].query(x), x) / 8**0.5
    centred = scores.softmax(dim=-1) - 1 / 8
    with operate(model, Surgery(skip=0.0, mlp="drop", attention="centred"), inputs=x):
        ratio = model(x) / (2 * centred)
    kept = (ratio - 1).abs() < 1e-9
    assert bool((kept | (ratio.abs() < 1e-9)).all())
    assert 0 < int(kept.sum()) < kept.numel()


def test_descriptions_are_plain_and_complete() -> None:
    full = Operation(
        attention_skip=0.5, mlp_skip=0.0, mlp="drop", norm="rms", mask=parse_mask("causal & window(2)"),
        mask_mode="unite", temperature=2.0, attention="centred", attention_scale=1.5, heads=frozenset({2, 0}),
        layers=frozenset({1}), stack="encoder",
    )  # fmt: skip
    described = json.loads(json.dumps(full.describe()))
    assert set(described) == {f.name for f in fields(Operation)}
    described["mask"] = parse_mask(described["mask"])
    described |= {name: frozenset(described[name]) for name in ("heads", "layers")}
    assert Operation(**described) == full
    assert Operation().describe() == {}
    assert Operation(layers=frozenset()).describe() == {"layers": []}


class Biased(nn.Module):
    """Attention with a learned bias on its scores, zero as it starts, given to the fused kernel as its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer()])

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.mlp = nn.Linear(8, 8), nn.Linear(8, 8)
            self.bias = nn.Parameter(torch.zeros(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            y = x.unsqueeze(1)
            x = x + scaled_dot_product_attention(self.query(x).unsqueeze(1), y, y, attn_mask=self.bias)[:, 0]
            return x + self.mlp(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def test_a_learned_bias_that_is_still_zero_gets_its_gradient() -> None:
    torch.manual_seed(0)
    model, x = Biased().double(), torch.randn(2, 6, 8, dtype=torch.float64)
    layer = model.layers[0]
    with operate(model, Surgery(skip=0.0, mlp="drop", temperature=2.0, mask="causal"), inputs=x):
        model(x).square().sum().backward()
    got, layer.bias.grad = layer.bias.grad, None
    scores = (torch.einsum("bqd,bkd->bqk", layer.query(x), x) / 8**0.5 + layer.bias) / 2.0
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    (scores.softmax(dim=-1) @ x).square().sum().backward()
    assert float((got - layer.bias.grad).abs().max()) <= 1e-12 * float(got.abs().max())


def test_operations_and_grafts_make_one_mixture_of_p() -> None:
    """Heads alone mix in no identity, which needs as many queries as keys: cross-attention has others."""
    P = torch.rand(2, 3, 4, 6, dtype=torch.float64).softmax(-1)
    alive = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)[:, None, None]
    heads = joint_mixture([Operation(heads=frozenset({1}))], [], P)
    assert heads is not None
    assert (heads.identity, heads.uniform) == (0.0, 0.0)
    assert torch.equal(mixed_probs(P, None, heads), P * alive)
    every = [Operation(attention_scale=2.0), Operation(attention="centred"), Operation(heads=frozenset({1}))]
    both = joint_mixture(every, [Mixture(own=0.5, uniform=0.25)], P)
    assert both is not None
    torch.testing.assert_close(mixed_probs(P, None, both), 0.5 * alive * 2.0 * (P - 1 / 6) + 0.25 / 6)
    assert joint_mixture([Operation(temperature=2.0)], [], P) is None
