"""The hand that carries grafts out: which tensors a graft is shown, in which shape, and what becomes of its answer."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from rankscope.errors import UnsupportedOperationError
from rankscope.models.stream import Stream
from rankscope.models.view import BlockCall, BlockPlan, Stack
from rankscope.stream.mode import ActiveBlock
from rankscope.surgery.graft import Attended, Graft, Place, Spot
from rankscope.surgery.graft_dispatcher import GraftDispatcher, spot_of

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 5, 4
PLAN = BlockPlan(("attention", "mlp"), ("attention",))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Noting(Graft):
    """Doubles what it is shown, adds one to what attention gives, and notes the shapes."""

    def __init__(self, *places: Place) -> None:
        super().__init__()
        self.touches = frozenset(places)  # type: ignore[misc]
        self.shown: list[tuple[int, ...]] = []
        self.given: Tensor | None = None
        self.resets = 0

    def doubled(self, x: Tensor) -> Tensor:
        self.shown.append(tuple(x.shape))
        return 2 * x

    def reset(self) -> None:
        self.resets += 1

    def read(self, at: Spot, x: Tensor) -> Tensor:
        return self.doubled(x)

    def add(self, at: Spot, label: str, stream: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.doubled(stream), 3 * branch

    def sum(self, at: Spot, label: str, total: Tensor, seen: Tensor | None) -> Tensor:  # type: ignore[override]
        return self.doubled(total) + torch.arange(total.shape[1])[:, None]

    def values(self, at: Spot, value: Tensor) -> Tensor:
        return self.doubled(value)

    def attended(self, at: Spot, heard: Attended) -> Tensor:
        self.shown += [tuple(heard.out.shape), tuple(heard.value.shape)]
        self.given = heard.read
        return heard.out + 1


def opened(x: Tensor, layout: str = "batch tokens dim", plan: BlockPlan = PLAN) -> ActiveBlock:
    return ActiveBlock(x, Stack("decoder", (BlockCall("layers.4", 4, (plan,)),), Stream(layout), None), 0)


@pytest.mark.parametrize("flat", [False, True])
def test_probabilities_meet_their_values_in_either_shape(flat: bool) -> None:
    graft = Noting("values")
    hand, x = GraftDispatcher([graft]), numbers(BATCH, TOKENS, 6)
    call, at = opened(x), Spot("decoder", 4, 1)
    shape = (BATCH * HEADS,) if flat else (BATCH, HEADS)
    probs, value = numbers(*shape, TOKENS, TOKENS).softmax(-1), numbers(*shape, TOKENS, WIDTH, seed=1)
    func = torch.bmm if flat else torch.matmul
    hand.owe_values(at)
    hand.follow_probs(probs, at)
    cast = probs.clone()
    hand.pass_on(Tensor.clone, (probs,), cast)
    assert hand.takes_product(func, (cast, value))
    assert not hand.takes_product(func, (probs, value)), "the probabilities are another object now"
    assert not hand.takes_product(func, (cast,))
    assert not hand.takes_product(torch.add, (cast, value))
    out = hand.product(call, func, (cast, value))
    torch.testing.assert_close(out, 2 * func(cast, value) + 1)
    assert graft.shown == [(BATCH, HEADS, TOKENS, WIDTH)] * 3
    assert not hand.takes_product(func, (cast, value)), "once"
    hand.check_values()


def test_the_probabilities_are_not_followed_through_what_changes_them() -> None:
    hand, probs = GraftDispatcher([Noting("values")]), numbers(1, 1, 3, 3)
    hand.follow_probs(probs, Spot(None, 0, 1))
    hand.pass_on(torch.tanh, (probs,), probs.tanh())
    hand.pass_on(Tensor.clone, (probs.clone(),), probs.clone())
    assert hand.takes_product(torch.matmul, (probs, probs))
    hand.reset()
    assert not hand.takes_product(torch.matmul, (probs, probs))


def test_values_that_were_never_seen_are_said() -> None:
    hand = GraftDispatcher([Noting("values")])
    for layer in (7, 2):
        hand.owe_values(Spot("decoder", layer, 9))
    with pytest.raises(UnsupportedOperationError, match="could not be seen in block 2, 7,"):
        hand.check_values()
    hand.check_values()
    other = GraftDispatcher([Noting("probs")])
    other.owe_values(Spot("decoder", 2, 9))
    other.check_values()


def test_a_graft_hears_what_the_attention_module_was_given() -> None:
    graft, x = Noting("values"), numbers(TOKENS, BATCH, 6)
    hand, call = GraftDispatcher([graft]), opened(x, "tokens batch dim")
    out, value = numbers(BATCH, HEADS, TOKENS, WIDTH), numbers(BATCH, 1, TOKENS, WIDTH, seed=1)
    hand.attended(call, spot_of(call), out, value)
    assert graft.given is None
    hand.attention_input = weakref.ref(x)
    assert torch.equal(hand.attended(call, spot_of(call), out, value), out + 1)
    assert graft.given is not None
    assert torch.equal(graft.given, x.transpose(0, 1))
    assert graft.shown[-1] == (BATCH, HEADS, TOKENS, WIDTH), "one entry per query head"


def test_what_is_read_and_what_is_added() -> None:
    x, branch, weight = numbers(BATCH, TOKENS, 6), numbers(BATCH, TOKENS, 6, seed=1), numbers(6, 6, seed=2)
    reads, adds = Noting("reads"), Noting("adds")
    hand, call = GraftDispatcher([reads, adds]), opened(x)
    with pytest.raises(UnsupportedOperationError, match="Block 4: the matrix product by which its mlp branch reads"):
        hand.add(call, "mlp", x, branch)
    new, same = hand.read(call, (x, weight))
    assert torch.equal(new, 2 * x)
    assert same is weight
    own, added = hand.add(call, "attention", x, branch)
    assert torch.equal(own, 2 * x)
    assert torch.equal(added, 3 * branch)
    with pytest.raises(UnsupportedOperationError, match="its mlp branch reads"):
        hand.add(call, "mlp", x, branch)
    joined = opened(x, plan=BlockPlan(("attention", "mlp"), ("attention",), joins=(False, True)))
    hand = GraftDispatcher([adds])
    for factor in (2, 1):
        joined.next_add()
        assert torch.equal(hand.add(joined, "mlp", x, branch)[0], factor * x), "the one skip is scaled once"


@pytest.mark.parametrize("layout", ["batch tokens dim", "tokens batch dim"])
def test_sums_are_shown_as_batch_tokens_dim(layout: str) -> None:
    x = numbers(BATCH, TOKENS, 6)
    total = x if layout == "batch tokens dim" else x.transpose(0, 1).contiguous()
    graft = Noting("sums")
    out = GraftDispatcher([graft]).sum(opened(total, layout), "mlp", total)
    expected = 2 * x + torch.arange(TOKENS)[:, None]
    assert torch.equal(out, expected if layout == "batch tokens dim" else expected.transpose(0, 1))
    assert graft.shown == [(BATCH, TOKENS, 6)]


def test_who_is_asked() -> None:
    grafts = [Noting("adds"), Noting("values", "adds")]
    hand = GraftDispatcher(grafts)
    assert hand.at("adds") == hand.grafts == grafts
    assert hand.at("values") == grafts[1:]
    assert hand.touches_attention
    assert not GraftDispatcher(grafts[:1]).touches_attention
    hand.seen = torch.ones(1)
    hand.reset()
    assert hand.seen is None
    assert [graft.resets for graft in grafts] == [1, 1]
