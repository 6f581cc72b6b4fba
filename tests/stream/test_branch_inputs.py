"""What an MLP reads, against hooks written by hand, and blocks in which that cannot be told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rankscope as rs
from rankscope.metrics import METRICS
from rankscope.models.inputs import Batch
from rankscope.stream import SiteSelection, trace, view_of
from rankscope.stream.tracer import Unreadable

SHARE = METRICS["outside_span_share"].function
# The modules whose input and output are those of the branch, as in the source of each model.
ENDS = {
    "bert": ("intermediate.dense", "output.dense"),
    "gpt2": ("mlp", "mlp"),
    "gemma2": ("mlp", "post_feedforward_layernorm"),
    "qwen3-moe": ("mlp", "mlp"),
}


def seen_at(model: nn.Module, batch: Batch) -> dict[int, object]:
    seen: dict[int, object] = {}
    with torch.no_grad():
        view = view_of(model, batch)
        with trace(view, SiteSelection.parse(["mlp.branch"]), lambda ref, shown: seen.update({ref.layer: shown})):
            batch.run(model)
    return seen


@pytest.mark.parametrize("preset", ENDS)
def test_it_reads_what_the_module_reads(preset: str) -> None:
    model = rs.load(f"init:tiny-{preset}").model.eval()
    ids = torch.randint(5, 95, (2, 8), generator=torch.Generator().manual_seed(0))
    batch = Batch({"input_ids": ids}, None, 0, 2)
    taken: list[Tensor] = []
    given: list[Tensor] = []
    for path, module in model.named_modules():
        first, last = (path.endswith(f".{end}") and "attention" not in path for end in ENDS[preset])
        if first:
            module.register_forward_pre_hook(lambda _, args: taken.append(args[0].clone()))
        if last:
            module.register_forward_hook(lambda _, args, out: given.append(out.clone()))
    with torch.no_grad():
        batch.run(model)
    want = list(zip(taken, given, strict=True))
    seen = seen_at(model, batch)
    assert len(want) == len(seen) == 3
    for (read, added), (got_read, got_added) in zip(want, seen.values(), strict=True):
        assert torch.equal(read, got_read)
        assert torch.equal(added, got_added)
        assert (SHARE(read, added) > 0.1).all()


class Hidden(torch.autograd.Function):
    """An operation that modes of torch functions do not see."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.tanh()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1))


class Block(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.attention, self.norm, self.other = Attention(), nn.LayerNorm(16), nn.LayerNorm(16)
        self.mlp_up, self.mlp_gate, self.mlp_down = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        nn.init.normal_(self.other.weight)

    def mlp(self, x: Tensor) -> Tensor:
        read = self.norm(x)
        if self.form == "two inputs, one hidden":
            return self.mlp_down(Hidden.apply(self.mlp_up(self.other(x))) * self.mlp_gate(read))
        if self.form == "overwritten":
            up = self.mlp_up(read)
            return self.mlp_down(up * read.mul_(2.0).sum(-1, keepdim=True).sigmoid().detach() + 0 * up)
        if self.form == "through a buffer":
            room = torch.empty_like(read)
            room[..., :8], room[..., 8:] = self.mlp_up(read)[..., :8], self.mlp_gate(read)[..., 8:]
            return self.mlp_down(room.relu())
        return self.mlp_down(Hidden.apply(self.mlp_up(read)) * self.mlp_gate(read))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.other(x))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(form) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("one input", ""),
        ("through a buffer", ""),
        ("two inputs, one hidden", "it reads 2 different tensors"),
        ("overwritten", "overwritten before its output was added|reads 2 different tensors"),
    ],
)
def test_it_is_right_or_refused(form: str, why: str) -> None:
    torch.manual_seed(0)
    net = Net(form).double().eval()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    taken: list[Tensor] = []
    for layer in net.layers:
        layer.mlp_up.register_forward_pre_hook(lambda _, args: taken.append(args[0].clone()))
    seen = seen_at(net, Batch({}, None, 0, 2, (x,)))
    assert len(seen) == 2
    for read, shown in zip(taken[-2:], seen.values(), strict=True):
        if why:
            assert isinstance(shown, Unreadable)
            assert any(one in shown.why for one in why.split("|"))
        else:
            assert torch.equal(shown[0], read)
