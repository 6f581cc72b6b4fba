"""Probabilities read beside fused kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rankscope.stream import attention_calls
from rankscope.stream.attention_calls import (
    AttentionCall,
    from_sdpa,
    from_softmax,
)
from rankscope.stream.discovery import discover
from rankscope.stream.sites import SiteSelection
from rankscope.stream.tracer import trace


def tensors(heads: int = 4, kv_heads: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, heads, 5, 8)
    return tuple(
        torch.randn(shape[0], h, *shape[2:], generator=generator).double() for h in (heads, kv_heads, kv_heads)
    )


@pytest.mark.parametrize("sequence_by_sequence", [False, True])
@pytest.mark.parametrize(
    "case", ["plain", "causal", "bool mask", "one mask", "a mask each", "scale", "grouped", "one key each"]
)
def test_probabilities_of_the_fused_kernel(
    case: str, sequence_by_sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sequence_by_sequence:
        monkeypatch.setattr(attention_calls, "_PART_BYTES", 1)
    query, key, value = tensors(4, 2 if case == "grouped" else 4)
    options = {
        "plain": {},
        "causal": {"is_causal": True},
        "bool mask": {"attn_mask": torch.rand(5, 5).fill_diagonal_(1.0) > 0.4},
        "one mask": {"attn_mask": torch.randn(1, 1, 5, 5).double()},
        "a mask each": {"attn_mask": torch.randn(2, 1, 5, 5).double()},
        "one key each": {},
        "scale": {"scale": 0.3},
        "grouped": {"enable_gqa": True},
    }[case]
    if case == "one key each":
        key = key[:1]
    own = F.scaled_dot_product_attention(query, key.expand(2, -1, -1, -1), value, **options)
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


def test_scores_that_overflow_are_not_taken_for_a_mask() -> None:
    query, key, _ = (tensor.float() for tensor in tensors())
    query[0, 0, 0], key[0, 0] = -1e30, 1e30
    probs = AttentionCall(query=query, key=key).probs()
    assert probs[0, 0, 0].isnan().all()
    assert probs[0, 1].isfinite().all()


def test_the_support_says_which_keys_are_seen() -> None:
    probs = torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]])
    assert AttentionCall(weights=probs).support().tolist() == [[[[True, False], [True, True]]]]
    query, key = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 4, 2)
    assert AttentionCall(query=query, key=key).support() is None
    causal = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()
    assert torch.equal(AttentionCall(query=query, key=key, is_causal=True).support(), causal)
    last = torch.tensor([1, 1, 0, 1]).bool()
    for mask in (last, torch.tensor([0.5, 0.0, -torch.inf, -3.0]), torch.tensor([0.0, 0.0, -1e30, 9.0])):
        assert torch.equal(AttentionCall(query=query, key=key, mask=mask).support(), last)
        both = AttentionCall(query=query, key=key, mask=mask, is_causal=True)
        assert torch.equal(both.support(), causal & last)


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_what_a_later_key_holds_reaches_no_row_before_it(damage: float) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 6, 5, 8, generator=generator), torch.randn(1, 2, 5, 8, generator=generator)
    whole = AttentionCall(query=query, key=key, is_causal=True).probs()
    hurt = key.clone()
    hurt[:, :, 3] = damage
    found = AttentionCall(query=query, key=hurt, is_causal=True).probs()
    assert torch.equal(found[:, :, :3], whole[:, :, :3])
    assert bool(found[:, :, 3:].isnan().any(-1).all())


def test_in_half_precision_probabilities_are_those_of_the_rounded_arguments() -> None:
    query, key, value = (t.bfloat16() for t in tensors())
    probs = AttentionCall(query=query, key=key, value=value).probs()
    assert probs.dtype == torch.float32
    exactly = (query.double() @ key.double().mT / 8**0.5).softmax(-1)
    torch.testing.assert_close(probs.double(), exactly, rtol=1e-5, atol=0)
