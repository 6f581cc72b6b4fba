"""The role of each branch is decided by replacing tokens, whatever its module is called, and surgery follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope import Inputs, Model, Surgery
from rankscope.errors import UnsupportedOperationError
from rankscope.surgery import operate
from rankscope.surgery.session import structure_of

DIM, TOKENS = 8, 12
IDS = torch.randint(0, 40, (2, TOKENS), generator=torch.Generator().manual_seed(0))

Mix = Callable[[nn.Module, Tensor], Any]


class Branch(nn.Module):
    """Two matrices, and a function of them and the input."""

    def __init__(self, run: Mix) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.gru = nn.GRU(DIM, DIM // 2, batch_first=True, bidirectional=True)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Layer(nn.Module):
    def __init__(self, first: Mix, second: Mix, names: tuple[str, str]) -> None:
        super().__init__()
        self.names = names
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        for name, run in zip(names, (first, second), strict=True):
            self.add_module(name, Branch(run))

    def parts(self, x: Tensor, first: bool = True, second: bool = True) -> Tensor:
        one, two = (self.get_submodule(name) for name in self.names)
        x = x + one(self.n1(x)) if first else x
        return x + two(self.n2(x)) if second else x

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(40, DIM), nn.Parameter(torch.randn(TOKENS, DIM))
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(DIM, 3)

    def forward(self, ids: Tensor, **parts: bool) -> Tensor:
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        for layer in self.layers:
            x = layer.parts(x, **parts) if parts else layer(x)
        return self.head(x)


def attention(m: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(m.a(x)[:, None], m.b(x)[:, None], x[:, None])[:, 0]


def mlp(m: Any, x: Tensor) -> Tensor:
    return m.b(F.gelu(m.a(x)))


def scan(m: Any, x: Tensor) -> Tensor:
    gate, value, state, out = torch.sigmoid(m.a(x)), m.b(x), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = (1 - gate[:, t]) * state + gate[:, t] * value[:, t]
        out.append(state)
    return torch.stack(out, 1)


def across_a_window(m: Any, x: Tensor) -> Tensor:
    """Tokens alone, but for one token that reads its neighbour in the window before."""
    out = mlp(m, x)
    half = x.shape[1] // 2
    return torch.cat([out[:, :half], out[:, half : half + 1] + m.a(x[:, half - 1 : half]), out[:, half + 1 :]], 1)


def expert_choice(m: Any, x: Tensor) -> Tensor:
    """Each of two experts takes the half of the tokens that suit it best."""
    scores = m.a(x)[..., :2]
    out = torch.zeros_like(x)
    for expert in range(2):
        chosen = scores[..., expert].topk(x.shape[1] // 2, dim=1).indices[..., None].expand(-1, -1, x.shape[2])
        out = out.scatter_add(1, chosen, m.b(x.gather(1, chosen)) * (expert + 1))
    return out


def other_sequence(m: Any, x: Tensor) -> Tensor:
    return m.a(x.flip(0))


MIXERS: dict[str, Mix] = {
    "scan": scan,
    "two directions": lambda m, x: m.gru(x)[0],
    "one pair of neighbours": across_a_window,
    "experts choose": expert_choice,
    "other sequence": other_sequence,
}
"""The last three are not in ``tests/hostile/generated/roles.py``, which holds more than fifty roles against twins."""
ALONE: dict[str, Mix] = {"mlp": mlp}


def net(first: Mix, second: Mix, names: tuple[str, str]) -> Net:
    torch.manual_seed(0)
    return Net(Layer(attention, second, names), *(Layer(first, second, names) for _ in range(2))).eval()


@pytest.mark.parametrize("kind", [*MIXERS, *ALONE])
def test_mlps_are_dropped_and_mixers_kept(kind: str) -> None:
    model = net(MIXERS.get(kind) or ALONE[kind], mlp, ("mlp", "token_mixer_rnn"))
    # Where sequences act on each other, no experiment can tell them from tokens.
    inputs = Inputs(IDS, axes="batch tokens") if kind == "other sequence" else IDS
    plans = structure_of(model, inputs).stacks[0].plans
    expected = "mixer" if kind in MIXERS else "mlp"
    assert [plan.skips for plan in plans] == [("attention", "mlp"), (expected, "mlp"), (expected, "mlp")]
    assert all(plan.is_proven for plan in plans)
    if kind == "experts choose":
        return  # surgery refuses a branch that scatters the stream
    with torch.no_grad():
        x = model.embed(IDS) + model.positions
        x = model.layers[0].parts(x, second=False)
        for layer in list(model.layers)[1:]:
            x = layer.parts(x, first=expected == "mixer", second=False)
        twin = model.head(x)
        with operate(model, Surgery(mlp="drop"), inputs=inputs):
            assert torch.allclose(model(IDS), twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["scan", "two directions"])
def test_a_mixer_beside_an_mlp(kind: str) -> None:
    """In x + (mixer(x) + mlp(x)) the summand that acts on tokens alone is the MLP; two mixers have none."""

    class Parallel(Layer):
        def parts(self, x: Tensor, first: bool = True, second: bool = True) -> Tensor:
            one, two = (self.get_submodule(name) for name in self.names)
            h = self.n1(x)
            branch = two(h) if second else torch.zeros_like(h)
            branch += one(h)
            return x + branch

    torch.manual_seed(0)
    model = Net(*(Parallel(MIXERS[kind], mlp, ("ffn", "mixer")) for _ in range(2))).eval()
    assert structure_of(model, IDS, "layers.*").stacks[0].plans[0].skips == ("both",)
    with torch.no_grad(), operate(Model(model, blocks="layers.*"), Surgery(mlp="drop"), inputs=IDS):
        changed = model(IDS)
    assert torch.allclose(changed, model(IDS, second=False), rtol=1e-5, atol=1e-6)
    torch.manual_seed(0)
    two = Net(*(Parallel(attention, MIXERS[kind], ("attn", "mlp")) for _ in range(2))).eval()
    assert structure_of(two, IDS, "layers.*").stacks[0].plans[0].skips == ("attention",)


def test_gains_of_zero_are_no_obstacle() -> None:
    """Branches that add nothing yet, as with ReZero, are tested with other gains; the model keeps its own."""

    class ReZero(Layer):
        def __init__(self, first: Mix) -> None:
            super().__init__(first, mlp, ("op", "other"))
            self.gain = nn.Parameter(torch.zeros(()))

        def parts(self, x: Tensor, first: bool = True, second: bool = True) -> Tensor:
            x = x + self.gain * self.op(self.n1(x))
            return x + self.gain * self.other(self.n2(x))

    torch.manual_seed(0)
    model = Net(ReZero(attention), ReZero(scan)).eval()
    plans = structure_of(model, IDS).stacks[0].plans
    assert [plan.skips for plan in plans] == [("attention", "mlp"), ("mixer", "mlp")]
    assert all(plan.is_proven for plan in plans)
    assert all(not layer.gain.any() for layer in model.layers)


def test_one_token_proves_nothing() -> None:
    model = net(scan, mlp, ("op", "other"))
    with (
        pytest.raises(UnsupportedOperationError, match="did not change when tokens"),
        operate(Model(model, blocks="layers.*"), Surgery(mlp="drop"), inputs=IDS[:, :1]),
    ):
        pass
