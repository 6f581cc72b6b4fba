"""Each graft by itself, against its formula."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope.errors import UnsupportedOperationError
from rankscope.models.stream import Stream
from rankscope.models.view import BlockCall, BlockPlan, ModelView, Stack
from rankscope.stream.attention_calls import AttentionCall
from rankscope.surgery.attention_grafts import AttentionMixing, ValueAnchor
from rankscope.surgery.branch_grafts import BranchGains, MlpWeightGains, PreNorming
from rankscope.surgery.graft import Attended, BlockGains, Graft, Mixture, Spot
from rankscope.surgery.graft_dispatcher import (
    changed_scores,
    for_each_head,
    joint_mixture,
    mixed_output,
    mixed_probs,
    score_gain,
    with_gain,
)
from tests.surgery.own_grafts import LengthScale

PLAN = BlockPlan(("attention", "mlp"), ("attention",), has_norm=True)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def view(model: nn.Module | None = None) -> ModelView:
    calls = tuple(BlockCall(f"{i}", i, (PLAN,)) for i in range(3))
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)).double() if model is None else model
    return ModelView(made, (Stack("vision.tower", calls, Stream("batch tokens dim"), None),))


def spot(layer: int) -> Spot:
    return Spot("vision.tower", layer, 3)


def test_gains_are_constants_or_parameters_by_block() -> None:
    fixed = BlockGains(view(), {"a": 0.5, "b": lambda at: at.layer + 10.0 * at.depth}, learnable=False)
    assert [fixed.at(spot(layer), "b") for layer in range(3)] == [30.0, 31.0, 32.0]
    assert fixed.at(spot(2), "a") == 0.5
    assert list(fixed.parameters()) == []
    assert fixed.describe() == {"a": 0.5, "b": "by block"}
    learned = BlockGains(view(), {"a": 0.5, "b": lambda at: at.layer + 10.0 * at.depth}, learnable=True)
    assert learned.describe() == {"vision_tower/a": [0.5] * 3, "vision_tower/b": [30.0, 31.0, 32.0]}
    assert {p.dtype for p in learned.parameters()} == {torch.float64}
    number = learned.at(spot(1), "b")
    assert isinstance(number, Tensor)
    number.backward()
    assert learned.learned["vision_tower/b"].grad.tolist() == [0.0, 1.0, 0.0]


def test_branches_and_stream_get_their_factors() -> None:
    x, branch = numbers(1, 4, 6), numbers(1, 4, 6, seed=1)
    graft = BranchGains(view(), 2.0, lambda at: 3.0 * at.layer, stream=lambda at: 5.0 + at.layer)
    for label, factor in (("attention", 2.0), ("both", 2.0), ("mlp", 3.0)):
        stream, scaled = graft.add(spot(1), label, x, branch)  # type: ignore[arg-type]
        assert torch.equal(stream, 6.0 * x)
        assert torch.equal(scaled, factor * branch)
    neutral = BranchGains(view(), 1.0, 1.0).add(spot(0), "mlp", x, branch)
    assert neutral[0] is x
    assert neutral[1] is branch
    assert graft.describe() == {"graft": "branch gains", "stream": "by block", "attention": 2.0, "mlp": "by block"}


def test_weight_matrices_outside_attention_are_scaled() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.up, self.norm = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4), nn.LayerNorm(4)

    class Bare(nn.Module):
        pass

    blocks = nn.Sequential(Block(), Block(), Block()).double()
    graft, x = MlpWeightGains(lambda at: at.layer + 2.0), numbers(5, 4)
    handles = list(graft.hooks(view(blocks)))
    assert len(handles) == 3
    for layer, block in enumerate(blocks):
        torch.testing.assert_close(block.up(x), F.linear(x, (layer + 2.0) * block.up.weight, block.up.bias))
        assert torch.equal(block.attention(x), F.linear(x, block.attention[0].weight, block.attention[0].bias))
        assert torch.equal(block.norm(x), F.layer_norm(x, (4,)))
    with pytest.raises(UnsupportedOperationError, match="no weight matrix of an MLP is a module"):
        list(graft.hooks(view(nn.Sequential(Bare(), Bare(), Bare()))))


def test_norms_are_left_out_but_the_last() -> None:
    x, out = numbers(1, 4, 6), numbers(1, 4, 6, seed=1)
    graft = PreNorming()
    for layer, is_last, kept in ((2, True, True), (2, False, False), (1, True, False)):
        got = graft.norm(spot(layer), x, out, is_last=is_last)
        assert torch.equal(got, out if kept else x)
        assert got is not x
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(graft.read(spot(0), x), centred / scale, rtol=1e-13, atol=0)


def test_values_of_the_first_block() -> None:
    first, value = numbers(1, 2, 4, 3), numbers(1, 2, 4, 3, seed=1)
    anchor, out = ValueAnchor(view(), 0.6), numbers(1, 2, 4, 3, seed=2)
    assert torch.equal(anchor.attended(spot(0), Attended(out, first, None)), out)
    got = anchor.attended(spot(1), Attended(out, value, None))
    torch.testing.assert_close(got, out + 0.6 * (first - value))
    with pytest.raises(UnsupportedOperationError, match=r"values of block 1 have the shape \(1, 2, 3, 3\)"):
        anchor.attended(spot(1), Attended(out, value[:, :, 1:], None))
    with pytest.raises(UnsupportedOperationError, match="Block 1 has 3 queries and 4 keys"):
        anchor.attended(spot(1), Attended(out[:, :, 1:], value, None))
    anchor.reset()
    with pytest.raises(UnsupportedOperationError, match="Block 1 ran without the first"):
        anchor.attended(spot(1), Attended(out, value, None))


def call(*, groups: int = 4, **options: object) -> AttentionCall:
    query, key, value = numbers(2, 4, 5, 8), numbers(2, groups, 5, 8, seed=1), numbers(2, groups, 5, 8, seed=2)
    return AttentionCall(query=query, key=key, value=value, **options)  # type: ignore[arg-type]


def test_scores_grow_with_the_number_of_keys_a_row_sees() -> None:
    graft, causal = LengthScale(view(), 2.0), torch.ones(5, 5).tril().bool()[None, None]
    gain = score_gain(spot(0), [graft, graft, Graft()], causal, (5, 5))
    assert isinstance(gain, Tensor)
    torch.testing.assert_close(gain.flatten(), (2.0 * torch.arange(1, 6).double().log()).square())
    alone = score_gain(spot(0), [graft], None, (5, 7))
    assert isinstance(alone, Tensor)
    assert alone.flatten().tolist() == pytest.approx([2.0 * math.log(7)] * 5)
    assert score_gain(spot(0), [Graft()], causal, (5, 5)) == 1.0
    bias = numbers(5, 5, seed=3).masked_fill(~causal[0, 0], -1e9)
    for options in ({"is_causal": True}, {"mask": bias}, {"mask": causal}):
        own = call(**options)
        scores = own.query @ own.key.mT / 8**0.5 + (bias if options.get("mask") is bias else 0.0)
        expected = (gain * scores).masked_fill(~causal, -torch.inf).softmax(-1)
        torch.testing.assert_close(with_gain(own, gain).probs(), expected, rtol=1e-12, atol=1e-15)
        hidden = scores.masked_fill(~causal, -torch.inf)
        got = changed_scores(hidden, causal.expand_as(hidden), spot(0), [graft, graft, Graft()]).softmax(-1)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-15)
        assert with_gain(own, 1.0) is own
        assert changed_scores(hidden, causal, spot(0), [Graft()]) is hidden
        torch.testing.assert_close(with_gain(own, 3.0).probs(), (3.0 * hidden).softmax(-1), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_a_mixture_of_identity_attention_and_uniform(groups: int) -> None:
    def rule(n: object) -> Mixture:
        return Mixture(n["a"], n["b"], n["c"])  # type: ignore[index]

    one = AttentionMixing(view(), {"a": 0.3, "b": 0.5, "c": -0.2}, rule)
    two = AttentionMixing(view(), {"a": 0.0, "b": 2.0, "c": 0.1}, rule)
    assert joint_mixture(spot(0), [Graft()]) is None
    mixture = joint_mixture(spot(0), [one, Graft(), two])
    assert mixture is not None
    own = call(groups=groups, is_causal=True)
    probs, seen = own.probs(), torch.ones(5, 5, dtype=torch.float64).tril()
    uniform = seen / seen.sum(-1, keepdim=True)
    expected = 2.0 * (0.3 * torch.eye(5, dtype=torch.float64) + 0.5 * probs - 0.2 * uniform) + 0.1 * uniform
    torch.testing.assert_close(mixed_probs(probs, seen.bool(), mixture), expected, rtol=1e-13, atol=1e-15)
    value = own.value.repeat_interleave(4 // groups, dim=1)
    assert torch.equal(for_each_head(own.value, 4), value)
    named = {"query": own.query, "key": own.key, "value": own.value, "is_causal": True, "enable_gqa": groups < 4}
    got = mixed_output(probs @ value, own, mixture, named, F.scaled_dot_product_attention)
    torch.testing.assert_close(got, expected @ value, rtol=1e-12, atol=1e-14)
    assert torch.equal(mixed_probs(probs[..., 1:, :], None, Mixture(0.0, 2.0, 0.0)), 2.0 * probs[..., 1:, :])
    with pytest.raises(UnsupportedOperationError, match="here are 4 queries and 5 keys"):
        mixed_probs(probs[..., 1:, :], None, Mixture(identity=1.0))
