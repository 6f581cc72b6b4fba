"""What a probe learns from the adds and attention calls inside one module call, one call at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.probe import Ancestry, CallRecord, ProbeFrame

X = torch.zeros(2, 5, 8)


def frame(entry: Tensor = X, attention_depth: int = 0) -> ProbeFrame:
    return ProbeFrame(entry, CallRecord("block", nn.Module(), None, entry.shape), attention_depth)


def computed(probe: ProbeFrame, *inputs: Tensor, func: object = torch.tanh, depth: int = 1) -> Tensor:
    """The result of a call on these tensors, one after the other told to the probe."""
    out = torch.zeros(2, 5, 8)
    probe.spread(func, list(inputs), [out], depth)  # type: ignore[arg-type]
    return out


def attended(probe: ProbeFrame, query: Tensor, key: Tensor, *, by_name: bool = False, counts: bool = True) -> Tensor:
    out = computed(probe, query, key)
    probe.see_attention(AttentionCall(query=query, key=key, value=key), [out], by_name, counts=counts)
    return out


def added(probe: ProbeFrame, stream: Tensor, branch: Tensor) -> Tensor:
    """The sum, which is the stream from then on."""
    assert probe.see_add(torch.add, (stream, branch), {}) is stream
    out = torch.zeros(2, 5, 8)
    probe.follow(out)
    return out


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [((2, 5, 8), 5), ((5, 2, 8), 5), ((10, 8), 5), ((2, 3, 7, 8), 21), ((2, 2, 8), 2), ((6, 16), 3)],
)
def test_tokens_of_every_layout(shape: Sequence[int], tokens: int) -> None:
    assert frame(torch.zeros(shape)).tokens(batch=2) == tokens


def test_attention_then_mlp() -> None:
    probe = frame()
    query = computed(probe, X)
    out = computed(probe, attended(probe, query, computed(probe, X)))
    assert probe.ancestry(out) == Ancestry.DERIVED | Ancestry.ATTENTION | Ancestry.FRESH
    x = added(probe, X, out)
    added(probe, x, computed(probe, x, func=F.linear))
    assert probe.record.adds == ["attention", "mlp"]
    assert probe.record.joins == [False, False]
    assert probe.record.attention == [(0, "attention")]
    assert probe.record.is_complete
    assert probe.record.mixes


def test_keys_from_elsewhere_make_cross_attention() -> None:
    probe, memory = frame(), torch.zeros(2, 9, 8)
    out = attended(probe, computed(probe, X), memory)
    assert probe.ancestry(out) & Ancestry.CROSS
    x = added(probe, X, out)
    added(probe, x, attended(probe, computed(probe, x), computed(probe, x), by_name=True))
    assert probe.record.adds == ["cross_attention", "cross_attention"]
    assert probe.record.attention == [(0, "cross_attention"), (1, "cross_attention")]
    other = frame()
    attended(other, memory, memory, counts=False)
    assert other.record.attention == []


def test_an_add_of_what_does_not_come_from_the_stream_is_no_skip() -> None:
    probe, positions = frame(), torch.zeros(2, 5, 8)
    assert probe.ancestry(positions) == Ancestry.NONE
    x = added(probe, X, computed(probe, positions))
    assert probe.record.adds == [None]
    added(probe, x, computed(probe, x, func=F.linear))
    assert probe.record.joins == [False, False]
    assert probe.record.labels == ["mlp"]
    assert probe.see_add(torch.add, (positions, torch.zeros(2, 5, 8)), {}) is None


def test_branches_computed_before_the_first_add_join_it() -> None:
    probe = frame()
    normed = torch.zeros(2, 5, 8)
    probe.follow_normed(normed)
    attention = attended(probe, computed(probe, normed), computed(probe, normed))
    mlp = computed(probe, normed, func=F.linear)
    assert probe.ancestry(mlp) & Ancestry.FRESH
    x = added(probe, X, attention)
    assert probe.ancestry(mlp) == Ancestry.DERIVED | Ancestry.MAPPED
    assert probe.ancestry(attention) == Ancestry.DERIVED | Ancestry.ATTENTION
    added(probe, x, mlp)
    assert probe.record.adds == ["attention", "mlp"]
    assert probe.record.joins == [False, True]
    assert not probe.adds_to_normed


def test_a_branch_added_to_a_norm_is_told() -> None:
    probe, normed = frame(), torch.zeros(2, 5, 8)
    probe.follow_normed(normed)
    added(probe, normed, computed(probe, normed))
    assert probe.adds_to_normed


def test_both_branches_added_at_once() -> None:
    probe = frame()
    attention, mlp = attended(probe, computed(probe, X), computed(probe, X)), computed(probe, X)
    both = computed(probe, attention, mlp, func=torch.add, depth=0)
    assert probe.joined is mlp
    added(probe, X, both)
    assert probe.record.adds == ["both"]
    inside = frame()
    attention, bias = attended(inside, computed(inside, X), computed(inside, X)), computed(inside, X)
    computed(inside, attention, bias, func=torch.add, depth=1)
    assert inside.joined is None, "inside an attention module the sum is part of attention"


def test_constants_and_shapes_come_from_nowhere() -> None:
    probe, other = frame(), torch.zeros(2, 5, 8)
    assert probe.ancestry(computed(probe, X, func=torch.zeros_like)) == Ancestry.NONE
    assert probe.ancestry(computed(probe, other, X, func=Tensor.expand_as)) == Ancestry.NONE
    assert probe.ancestry(computed(probe, other, X)) == Ancestry.DERIVED | Ancestry.FRESH
    probe.mark_attention(X, crosses=True)
    assert probe.ancestry(X) == Ancestry.DERIVED | Ancestry.FRESH, "the stream itself is never a branch"
