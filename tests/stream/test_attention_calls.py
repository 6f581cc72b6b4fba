"""Probabilities read beside fused kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rankscope.stream.attention_calls import AttentionCall, from_sdpa, from_softmax, is_attention_shaped
from rankscope.stream.discovery import discover
from rankscope.stream.sites import SiteSelection
from rankscope.stream.tracer import trace


def tensors(heads: int = 4, kv_heads: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, heads, 5, 8)
    return tuple(
        torch.randn(shape[0], h, *shape[2:], generator=generator).double() for h in (heads, kv_heads, kv_heads)
    )


@pytest.mark.parametrize("case", ["plain", "causal", "bool mask", "float mask", "scale", "grouped"])
def test_probabilities_of_the_fused_kernel(case: str) -> None:
    query, key, value = tensors(4, 2 if case == "grouped" else 4)
    options = {
        "plain": {},
        "causal": {"is_causal": True},
        "bool mask": {"attn_mask": torch.rand(5, 5).fill_diagonal_(1.0) > 0.4},
        "float mask": {"attn_mask": torch.randn(2, 1, 5, 5).double()},
        "scale": {"scale": 0.3},
        "grouped": {"enable_gqa": True},
    }[case]
    own = F.scaled_dot_product_attention(query, key, value, **options)
    call = from_sdpa((query, key, value), options)
    if case == "grouped":
        value = value.repeat_interleave(2, dim=1)
    assert call is not None
    assert torch.allclose(call.probs() @ value, own, rtol=1e-12, atol=0)
    assert call.mismatch() < 1e-13


def test_a_wrong_scale_would_be_noticed() -> None:
    query, key, value = tensors()
    call = AttentionCall(query=query, key=key, value=value)
    assert call.mismatch() < 1e-13
    call.query.mul_(1.0)
    ours = AttentionCall(query=query * 2, key=key, value=value).probs() @ value
    assert not torch.allclose(ours, F.scaled_dot_product_attention(query, key, value), rtol=1e-3)


@pytest.mark.parametrize("need_weights", [True, False])
def test_inside_torch_multi_head_attention(need_weights: bool) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(32, 4, batch_first=True)
            self.mlp = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attn(x, x, x, need_weights=need_weights)[0]
            return x + self.mlp(x)

    torch.manual_seed(0)
    model, x, seen = Wrapped().eval(), torch.randn(3, 7, 32), []
    view = discover(model, lambda: model(x), batch=3)
    with (
        torch.no_grad(),
        trace(view, SiteSelection.parse(["attention.probs"]), lambda ref, call: seen.append(call.probs())),
    ):
        model(x)
    with torch.no_grad():
        expected = model.attn(x, x, x, average_attn_weights=False)[1]
    assert torch.allclose(seen[0], expected, rtol=1e-5, atol=1e-7)
    assert F.softmax.__name__ == "softmax"
    assert F.softmax.__module__ == "torch.nn.functional"


def test_what_is_taken_for_attention_by_shape() -> None:
    scores = torch.rand(2, 4, 7, 7)
    assert is_attention_shaped(scores, batch=2, tokens=7, inside_attention=False)
    assert is_attention_shaped(scores.flatten(0, 1), batch=2, tokens=7, inside_attention=True)
    assert not is_attention_shaped(scores.flatten(0, 1), batch=2, tokens=7, inside_attention=False)
    assert not is_attention_shaped(scores, batch=2, tokens=6, inside_attention=True)


def test_a_sink_column_is_cut_off() -> None:
    call = from_softmax(torch.randn(2, 4, 7, 8).softmax(-1), tokens=7)
    assert call.probs().shape == (2, 4, 7, 7)
    assert float(call.probs().sum(-1).max()) < 1


def test_a_query_that_sees_no_key_has_no_probabilities() -> None:
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    visible = torch.ones(5, 5, dtype=torch.bool).tril(-1)
    for mask in (visible, torch.zeros(5, 5).masked_fill(~visible, -torch.inf)):
        call = AttentionCall(query=query, key=key, value=torch.eye(5).expand(1, 2, 5, 5), mask=mask)
        assert torch.equal(call.probs()[:, :, 0], torch.zeros(1, 2, 5))
        assert call.mismatch() < 1e-6
