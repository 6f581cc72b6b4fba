"""Views made one give what each of them gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.attention_scores import AttentionScores
from rankscope.linalg.joining import Joinable, joined
from rankscope.linalg.routing import Routing
from rankscope.linalg.tokens import Tokens
from rankscope.linalg.update import Update
from rankscope.metrics import METRICS, MetricSpec, View, evaluate

READS_ACTIVATIONS = {"uniformity"}


def tokens(keep: Tensor | None, seed: int) -> Tokens:
    x = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(seed))
    return Tokens(x * 10.0 ** torch.arange(5), keep)


def attention(keep: Tensor | None, seed: int) -> AttentionMatrix:
    scores = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    support = torch.ones(6, 6, dtype=torch.bool).tril()
    return AttentionMatrix(scores.masked_fill(~support, -torch.inf).softmax(-1), support, keep)


def update(keep: Tensor | None, seed: int) -> Update:
    return Update(*torch.randn(2, 2, 6, 5, generator=torch.Generator().manual_seed(seed)), keep)


def routing(keep: Tensor | None, seed: int) -> Routing:
    probs = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    return Routing(probs, probs.topk(2).indices, keep)


def scores(keep: Tensor | None, seed: int) -> AttentionScores:
    return AttentionScores(torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed)), keep)


VIEWS = {"tokens": tokens, "attention": attention, "update": update, "router": routing, "scores": scores}


def specs_of(side: str) -> list[MetricSpec]:
    return [spec for spec in METRICS.values() if spec.side == side and spec.name not in READS_ACTIVATIONS]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("side", VIEWS)
def test_metrics_of_joined_views_are_those_of_each(side: str, padded: bool) -> None:
    keep = torch.tensor([[True] * 6, [True] * 4 + [False] * 2]) if padded else None
    specs = specs_of(side)
    assert specs
    made: list[View] = [VIEWS[side](keep, seed) for seed in range(3)]
    each = [evaluate(specs, view, 1e-6) for view in made]
    copies = [view.made.copied() for view in made if isinstance(view, Joinable)]
    assert len({one.likeness for one in copies}) == 1
    together = evaluate(specs, joined(copies), 1e-6)
    torch.testing.assert_close(
        together.values, torch.cat([one.values for one in each], 1), rtol=1e-14, atol=0, equal_nan=True
    )
    assert torch.equal(together.statuses, torch.cat([one.statuses for one in each], 1))


def test_a_view_that_waits_does_not_follow_what_the_model_overwrites() -> None:
    x, probs = torch.randn(2, 6, 5), torch.rand(2, 3, 6, 6)
    support = probs > 0.5
    views: list[Joinable] = [
        Tokens(x),
        Update(x, x.clone()),
        Update.between(x, x.clone()),
        AttentionMatrix(probs, support),
        Routing(probs[0], support.long()[0]),
        AttentionScores(probs),
    ]
    copies = [view.made.copied() for view in views]
    before = [[None if t is None else t.clone() for t in copy.tensors] for copy in copies]
    for given in (x, probs, support):
        given.zero_()
    for copy, kept in zip(copies, before, strict=True):
        for tensor, same in zip(copy.tensors, kept, strict=True):
            assert (tensor is None and same is None) or torch.equal(tensor, same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(8, 64, 64), (4, 100, 160), (6, 64, 100), (5, 200, 64), (2, 16, 32), (3, 300, 300)])
def test_views_that_wait_on_a_cpu_keep_their_bits(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    drawn = torch.Generator().manual_seed(1)
    views = [Tokens((torch.randn(shape, generator=drawn) + 0.5).to(dtype)) for _ in range(3)]
    assert all(view.keeps_bits for view in views)
    specs = [spec for spec in METRICS.values() if spec.side == "tokens"]
    together = evaluate(specs, joined([view.made.copied() for view in views]), 1e-7).values
    alone = torch.cat([evaluate(specs, view, 1e-7).values for view in views], 1)
    assert torch.equal(together.nan_to_num(), alone.nan_to_num())


def test_a_sequence_that_is_alone_does_not_wait_on_a_cpu() -> None:
    """A product of one matrix may round differently from a product of several."""
    assert not Tokens(torch.randn(1, 300, 300)).keeps_bits
    assert not Tokens(torch.randn(4, 1024, 1024)).keeps_bits
