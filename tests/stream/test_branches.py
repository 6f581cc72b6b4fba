"""What a branch is, asked by a replay of the recorded pass; where code reads numbers, by running its module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankscope.models.view import BlockPlan
from rankscope.stream.tokens import Tokens
from rankscope.surgery.session import structure_of
from tests.stream.test_roles import DIM, IDS, Mix, Net, attention, mlp, net


def expert_choice_by_numbers(m: Any, x: Tensor) -> Tensor:
    """Each of two experts takes the half of the tokens that suit it best, one after the other."""
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for expert in range(2):
            for token in m.a(x[row])[:, expert].topk(x.shape[1] // 2).indices.tolist():
                out[row, token] += m.b(x[row, token]) * (expert + 1)
    return out


def token_choice_by_numbers(m: Any, x: Tensor) -> Tensor:
    """Each token takes one of two experts; the tokens of each are sorted together and counted."""
    rows = x.flatten(0, 1)
    order = m.a(rows)[:, :2].argmax(-1).sort(stable=True)
    counts = order.values.bincount(minlength=2).tolist()
    experts = [m.b(part) * (number + 1) for number, part in enumerate(rows[order.indices].split(counts))]
    return torch.zeros_like(rows).index_copy(0, order.indices, torch.cat(experts)).view(x.shape)


@pytest.mark.parametrize(("run", "label"), [(expert_choice_by_numbers, "mixer"), (token_choice_by_numbers, "mlp")])
def test_numbers_that_code_reads_are_read_again(run: Mix, label: str) -> None:
    """With the numbers of the first pass, the one would act on tokens alone, and the other would mix them."""
    plans = structure_of(net(run, mlp, ("op", "other")), IDS).stacks[0].plans
    assert [plan.skips for plan in plans] == [("attention", "mlp"), (label, "mlp"), (label, "mlp")]
    assert all(plan.is_proven for plan in plans)


class InForward(nn.Module):
    """A block whose own forward reads numbers: there is no module that could be run in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + attention(self, self.norm(x))
        return x + token_choice_by_numbers(self, self.norm(x))


def test_what_cannot_be_read_again_is_left_undecided() -> None:
    torch.manual_seed(0)
    plans = structure_of(Net(InForward(), InForward()).eval(), IDS).stacks[0].plans
    assert [plan.skips for plan in plans] == [("attention", "mlp")] * 2
    assert [plan.responses for plan in plans] == [("mixes", None)] * 2
    assert not any(plan.is_proven for plan in plans)


class Twins(nn.Module):
    """Blocks whose only difference is what an attribute is called."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Linear(DIM, DIM))
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.arange(1, x.shape[1] + 1)[:, None]
        x = x + self.get_submodule(self.name)(x.cumsum(1) / seen)
        return x + self.down(self.up(x).relu())


def plans_of(name: str) -> tuple[BlockPlan, ...]:
    torch.manual_seed(0)
    return structure_of(Net(Twins(name), Twins(name)).eval(), IDS).stacks[0].plans


def test_names_decide_nothing() -> None:
    found = [plans_of(name) for name in ("mix", "attn", "cross_attn", "mlp", "norm")]
    assert all(plans == found[0] for plans in found)
    assert found[0][0].skips == ("mixer", "mlp")


def test_cross_attention_acts_on_the_tokens_of_its_own_stream_alone() -> None:
    """As its twin does: another token of the decoder changes what is added to that token, and to no other."""
    torch.manual_seed(0)
    model = nn.Transformer(DIM, 2, 1, 2, 2 * DIM, batch_first=True).eval()
    source, target = torch.randn(2, 6, DIM), torch.randn(2, 5, DIM)
    stacks = structure_of(model, {"src": source, "tgt": target}).stacks
    plan = next(stack.plans[0] for stack in stacks if "cross_attention" in stack.plans[0].skips)
    assert plan.skips == ("attention", "cross_attention", "mlp")
    assert plan.responses == ("mixes", "alone", "alone")
    attend, other = model.decoder.layers[0].multihead_attn, target.clone()
    other[:, 2] += 1.0
    with torch.no_grad():
        change = (attend(target, source, source)[0] - attend(other, source, source)[0]).abs().amax((0, 2))
    assert (change > 1e-6).tolist() == [False, False, True, False, False]


def test_each_pair_of_neighbours_is_told_apart() -> None:
    for shape in ((2, 3, 4), (2, 7, 4), (2, 40, 4)):
        tokens = Tokens(torch.Size(shape), 2)
        chosen = torch.cat([one[..., 0] for number in range(2) if (one := tokens.replaced(number)) is not None])
        pairs = [(0, later) for later in range(1, shape[1])] + [(at, at + 1) for at in range(shape[1] - 1)]
        for one, other in pairs:
            assert bool((chosen[:, one] & ~chosen[:, other]).any())
            assert bool((chosen[:, other] & ~chosen[:, one]).any())
