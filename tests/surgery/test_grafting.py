"""All grafts at once, over operations, in a model that attends in four ways, against the formulas written out."""

from __future__ import annotations

import math
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope import Surgery
from rankscope.errors import UnsupportedOperationError
from rankscope.surgery.attention_grafts import AttentionMixing
from rankscope.surgery.branch_grafts import BranchGains
from rankscope.surgery.graft import Graft, Mixture
from rankscope.surgery.operating import grafting, operate
from rankscope.surgery.session import _SURGEONS, structure_of
from tests.surgery.own_grafts import NormGains, ValueMixing
from tests.surgery.written_out import CARRIERS, DIM, WIDTH, Attention, Model, build, split


def stream(seed: int = 3) -> Tensor:
    return torch.randn(2, 7, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mixing(start: object) -> Mixture:
    return Mixture(start["identity"], start["own"], start["uniform"])  # type: ignore[index]


def attend(attention: Attention, x: Tensor, first: list[Tensor], share: float) -> Tensor:
    query, key, value = split(attention, x)
    first.append(value)
    value = (1 - share) * value + share * first[0]
    seen = torch.ones(7, 7, dtype=torch.float64)
    seen = seen.tril() if attention.causal else seen
    keys = seen.sum(-1, keepdim=True)
    scores = query @ key.mT / math.sqrt(WIDTH) / 2.0
    probs = scores.masked_fill(seen == 0, -torch.inf).softmax(-1)
    mixed = (0.2 * torch.eye(7, dtype=torch.float64) + 0.5 * probs + 0.3 * seen / keys) @ value
    return attention.weights.out_proj(mixed.transpose(1, 2).reshape(x.shape))


def written_out(model: Model, x: Tensor, share: float) -> Tensor:
    """Temperature 2 and gain one half from the operation; everything else from grafts."""
    first: list[Tensor] = []
    for number, block in enumerate(model.blocks):
        x = 0.5 * 1.5 * x + 0.8 * attend(block.attention, block.norm1(x) / (number + 1), first, share)
        x = 0.5 * 1.5 * x + 0.6 * block.mlp(block.norm2(x) / (number + 1))
    return F.layer_norm(x, (DIM,), model.norm.weight, model.norm.bias, model.norm.eps)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_all_grafts_at_once(carrier: str, causal: bool) -> None:
    model, x = build("pre", carrier, causal, 3), stream()
    share = 0.0 if carrier == "torch with weights" else 0.3
    bare = model(x)
    with operate(model, Surgery(skip=0.5, temperature=2.0), inputs=x), ExitStack() as stack:
        view = structure_of(model)
        grafts: list[Graft] = [
            NormGains(lambda at: 1 / (at.layer + 1)),
            AttentionMixing(view, {"identity": 0.2, "own": 0.5, "uniform": 0.3}, mixing),
            BranchGains(view, 0.8, 0.6, stream=1.5),
        ]
        grafts += [ValueMixing(share)] if share else []
        for graft in grafts:
            stack.enter_context(grafting(model, graft))
        got = model(x)
        again = model(x)
    want = written_out(model, x, share)
    assert float((got - want).detach().abs().max()) < 1e-12 * float(want.detach().abs().max())
    assert torch.equal(got, again)
    assert torch.equal(model(x), bare)
    assert model not in _SURGEONS
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_graft_that_cannot_take_hold_leaves_nothing() -> None:
    model, x = build("pre", "torch with weights", False), stream()
    bare = model(x)
    with (
        grafting(model, ValueMixing(0.3), inputs=x),
        pytest.raises(UnsupportedOperationError, match="product of attention probabilities and values"),
    ):
        model(x)
    assert torch.equal(model(x), bare)
    assert model not in _SURGEONS
