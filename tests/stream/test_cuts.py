"""Skips in a form that nobody listed are found by experiment, and known forms stay editable."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope import Model, Surgery
from rankscope.errors import DiscoveryError, LayoutError, UnsupportedOperationError
from rankscope.stream.claims import claims_of
from rankscope.stream.viewing import with_proven_cuts
from rankscope.surgery import operate
from rankscope.surgery.session import structure_of
from rankscope.verbs.doctor.run import doctor
from rankscope.verbs.measure.run import measure
from tests.hostile.generated.networks import Network, Wanted
from tests.hostile.suite import CASES
from tests.stream.test_roles import DIM, IDS, Branch, Layer, Net, attention, mlp, net, scan

Join = Callable[[Tensor, Tensor], Tensor]

UNKNOWN: dict[str, Join] = {
    "nansum": lambda x, f: torch.stack([x, f]).nansum(0),
    "cumsum": lambda x, f: torch.stack([x, f]).cumsum(0)[-1],
    "sum": lambda x, f: torch.cat([x, f], -1).unflatten(-1, (2, DIM)).sum(-2),
    "fft": lambda x, f: torch.fft.fft(torch.stack([x, f]), dim=0)[0].real,
    "_foreach_add": lambda x, f: torch._foreach_add([x], [f])[0],
    "add": lambda x, f: torch.from_numpy(x.detach().numpy().copy()) + f,
    "map_": lambda x, f: x.clone().map_(f.contiguous(), lambda a, b: a + b),  # type: ignore[no-untyped-call]
    "embedding_bag": lambda x, f: F.embedding_bag(
        torch.arange(2 * x.numel() // DIM).view(2, -1).T, torch.cat([x, f]).view(-1, DIM), mode="sum"
    ).view_as(x),
    "segment_reduce": lambda x, f: torch.segment_reduce(
        torch.stack([x, f]).view(2, -1), "sum", lengths=torch.tensor([2]), axis=0
    ).view_as(x),
}


class Joined(Layer):
    """Attention and an MLP, each joined with the stream by a function."""

    def __init__(self, first: Join, second: Join) -> None:
        super().__init__(attention, mlp, ("attn", "ffn"))
        self.joins = first, second

    def forward(self, x: Tensor) -> Tensor:
        x = self.joins[0](x, self.attn(self.n1(x)))
        return self.joins[1](x, self.ffn(self.n2(x)))


def test_long_skips_cost_two_further_passes() -> None:
    case = CASES["long_skips"]
    model, passes = case.model(), [0]
    model.register_forward_pre_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    assert structure_of(model, case.given()).stacks[0].long_skips
    # The axes of the inputs 4, as always; one with every form of a sum, and one in which it is known what blocks are.
    assert passes[0] == 6


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", UNKNOWN)
@pytest.mark.parametrize("plain", [None, 0, 1])
def test_an_unknown_sum_is_right_or_refused_and_named(kind: str, plain: int | None) -> None:
    torch.manual_seed(0)
    joins = [torch.add if number == plain else UNKNOWN[kind] for number in (0, 1)]
    model = Net(*(Joined(*joins) for _ in range(2))).eval()
    x = model.embed(IDS) + model.positions
    for layer in model.layers:
        x = layer.ffn(layer.n2(layer.attn(layer.n1(x))))
    (stack,) = with_proven_cuts(structure_of(model, IDS, "layers.*")).stacks
    if plain == 0 and not stack.carries:  # the last of two sums is edited where stream and branch are stacked
        with torch.no_grad(), operate(Model(model, blocks="layers.*"), Surgery(skip=0.0), inputs=IDS):
            assert torch.allclose(model(IDS), model.head(x), rtol=1e-5, atol=1e-6)
        return
    with (
        pytest.raises(UnsupportedOperationError, match=r"gets around blocks.*layers\.0") as error,
        operate(Model(model, blocks="layers.*"), Surgery(skip=0.0), inputs=IDS),
    ):
        pass
    assert re.search(rf"block 0: (torch\.)?(fft_)?{kind} in layers\.0", str(error.value)), (
        "not the sum that can be edited"
    )


def test_a_branch_through_numpy_is_refused() -> None:
    """The add is seen, but not that its branch comes from the stream, so that its skip would stay."""
    model = net(lambda m, x: m.a(torch.from_numpy(x.detach().numpy()[:, ::-1].copy())), mlp, ("op", "other"))
    with (
        pytest.raises(UnsupportedOperationError, match="gets around blocks"),
        operate(model, Surgery(skip=0.0), inputs=IDS),
    ):
        pass


def test_a_term_that_is_not_a_branch_is_no_leak() -> None:
    """Weights applied to something else than the stream, as to a time embedding, may be added to it."""

    class Timed(Layer):
        def parts(self, x: Tensor, first: bool = True, second: bool = True) -> Tensor:
            return super().parts(x + self.op.a(torch.ones(1, 1, DIM)), first, second)

    torch.manual_seed(0)
    model = Net(*(Timed(attention, mlp, ("op", "other")) for _ in range(2))).eval()
    assert not with_proven_cuts(structure_of(model, IDS, "layers.*")).stacks[0].carries


class PostNorm(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.n1(x + self.op(x))
        return self.n2(x + self.other(x))


class Bare(nn.Module):
    """No skips at all."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ffn = Branch(attention), Branch(mlp)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(self.attn(x))


def test_known_forms_have_no_leak() -> None:
    torch.manual_seed(0)
    post = Net(*(PostNorm(attention, mlp, ("op", "other")) for _ in range(2))).eval()
    for model in (net(scan, mlp, ("op", "other")), post):
        (stack,) = with_proven_cuts(structure_of(model, IDS)).stacks
        assert stack.cuts_proven
        assert not stack.carries
    bare = Net(Bare(), Bare()).eval()
    assert not with_proven_cuts(structure_of(bare, IDS, "layers.*")).stacks[0].carries
    with (
        pytest.raises(UnsupportedOperationError, match="already runs without"),
        operate(Model(bare, blocks="layers.*"), Surgery(skip=0.0), inputs=IDS),
    ):
        pass


def test_claims_and_what_they_cost() -> None:
    model = net(scan, mlp, ("op", "other"))
    passes = [0]
    model.register_forward_pre_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    view = structure_of(model, IDS)
    # Axes of the inputs 4, of which one also shows the sums of the stream and the calls of the blocks, and two what a
    # token and a sequence change. What branches are is asked of the recording.
    assert passes[0] == 4
    found = passes[0]
    assert structure_of(model, IDS).stacks == view.stacks
    assert passes[0] == found, "remembered for this model"
    with_proven_cuts(with_proven_cuts(view))
    assert passes[0] - found == 1, "proven once"
    claims = {(claim.about, claim.says.split(" in ")[0]): claim for claim in claims_of(with_proven_cuts(view))}
    assert all(claim.proven_by for claim in claims.values())
    assert "other tokens changed" in str(claims["roles", "mixer"].proven_by)
    assert "no other token" in str(claims["roles", "mlp"].proven_by)
    assert {about for about, _ in claims} == {"blocks", "axes", "skips", "roles", "causality"}
    report = doctor(model, IDS)
    assert report.claims == claims_of(with_proven_cuts(view))
    assert "not proven" not in str(report)
    run = measure(model, IDS, metrics=["relative_residual"])
    assert {entry["about"] for entry in run.provenance.structure} == {about for about, _ in claims}
    assert run.provenance.from_json(run.provenance.to_json()).structure == run.provenance.structure


def centred(m: Any, x: Tensor) -> Tensor:
    return m.a(x - x.mean(1, keepdim=True))


def entrywise(m: Any, x: Tensor) -> Tensor:
    return m.a.bias * torch.sin(2 * x + m.b.bias)


class Gained(Layer):
    """The stream is scaled by a view of a parameter before the second sum, and normalised nowhere."""

    def parts(self, x: Tensor, first: bool = True, second: bool = True) -> Tensor:
        one, two = (self.get_submodule(name) for name in self.names)
        x = x + one(x)
        return x * self.n2.weight.view(1, -1) + two(x)


class Nested(Layer):
    """The MLP reads a sum that does not become the stream."""

    def parts(self, x: Tensor, first: bool = True, second: bool = True) -> Tensor:
        one, two = (self.get_submodule(name) for name in self.names)
        return x + two(x + one(x))


def without_skips(model: Net, branches: Callable[[Any, Tensor], Tensor]) -> Tensor:
    x = model.embed(IDS) + model.positions
    for layer in model.layers:
        x = branches(layer, x)
    return model.head(x)


def test_a_sum_inside_a_branch_is_not_a_skip() -> None:
    """``x + f(h - h.mean(1))``: the difference was cut as well, and so left the mean alone."""
    torch.manual_seed(0)
    model = Net(*(Layer(centred, mlp, ("op", "other")) for _ in range(2))).eval()
    by_hand = without_skips(model, lambda layer, x: layer.other(layer.n2(layer.op(layer.n1(x)))))
    with torch.no_grad(), operate(model, Surgery(skip=0.0), inputs=IDS):
        assert torch.allclose(model(IDS), by_hand, rtol=1e-5, atol=1e-6)
    by_hand = model(IDS, second=False)
    with torch.no_grad(), operate(model, Surgery(mlp="drop"), inputs=IDS):
        assert torch.allclose(model(IDS), by_hand, rtol=1e-5, atol=1e-6)


def test_a_sum_inside_a_branch_that_holds_a_branch_itself_is_refused() -> None:
    torch.manual_seed(0)
    model = Net(*(Nested(attention, mlp, ("op", "other")) for _ in range(2))).eval()
    with (
        pytest.raises(UnsupportedOperationError, match=r"gets around blocks.*torch\.add in layers\.0"),
        operate(Model(model, blocks="layers.*"), Surgery(skip=0.0), inputs=IDS),
    ):
        pass


def test_a_branch_that_acts_entry_by_entry_has_a_skip() -> None:
    """No matrix and no other token is involved, so that what it adds looked like a part of the stream."""
    torch.manual_seed(0)
    model = Net(*(Gained(attention, entrywise, ("op", "other")) for _ in range(2))).eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.n2.weight.uniform_(0.5, 1.5)
    by_hand = without_skips(model, lambda layer, x: layer.other(layer.op(x)))
    with torch.no_grad(), operate(Model(model, blocks="layers.*"), Surgery(skip=0.0), inputs=IDS):
        assert torch.allclose(model(IDS), by_hand, rtol=1e-5, atol=1e-6)


class Beside(Layer):
    """Token mixing and an MLP are added to each other first."""

    def parts(self, x: Tensor, first: bool = True, second: bool = True) -> Tensor:
        one, two = (self.get_submodule(name) for name in self.names)
        h = self.n1(x)
        return x + (one(h) + two(h) if second else one(h))


def memory(m: Any, x: Tensor) -> Tensor:
    keys, values = m.a.weight.expand(len(x), -1, -1), m.b.weight.expand(len(x), -1, -1)
    return F.scaled_dot_product_attention(x, keys, values)


@pytest.mark.parametrize("beside", [mlp, memory])
def test_an_mlp_beside_token_mixing_is_dropped_whatever_it_is_made_of(beside: Any) -> None:
    """One that multiplies by no matrix was taken for a part of the mixing, and stayed."""
    torch.manual_seed(0)
    model = Net(*(Beside(scan, beside, ("op", "other")) for _ in range(2))).eval()
    by_hand = model(IDS, second=False)
    with torch.no_grad(), operate(Model(model, blocks="layers.*"), Surgery(mlp="drop"), inputs=IDS):
        assert torch.allclose(model(IDS), by_hand, rtol=1e-5, atol=1e-6)


def test_what_acts_entry_by_entry_beside_token_mixing_is_refused() -> None:
    torch.manual_seed(0)
    model = Net(*(Beside(scan, entrywise, ("op", "other")) for _ in range(2))).eval()
    with (
        pytest.raises(UnsupportedOperationError, match=r"layers\.0 has paths around its parts.*Write the sums"),
        operate(Model(model, blocks="layers.*"), Surgery(mlp="drop"), inputs=IDS),
    ):
        pass


class Sliced(Layer):
    """Sums in two halves, which are not recognised."""

    def parts(self, x: Tensor, first: bool = True, second: bool = True) -> Tensor:
        one, two = (self.get_submodule(name) for name in self.names)
        for branch, norm in ((one, self.n1), (two, self.n2)):
            f, half = branch(norm(x)), DIM // 2
            x = torch.cat([x[..., :half] + f[..., :half], x[..., half:] + f[..., half:]], -1)
        return x


class Towers(Net):
    """Two lists of blocks, each with its own stream."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers[::2])
        self.right = nn.ModuleList(layers[1::2])

    def forward(self, ids: Tensor, **parts: bool) -> Tensor:
        x = y = self.embed(ids) + self.positions[: ids.shape[1]]
        for left, right in zip(self.layers, self.right, strict=True):
            x, y = left(x), right(y)
        return self.head(x + y)


def test_parts_of_a_branch_are_not_taken_for_blocks() -> None:
    """They feed one another and keep the shape of the stream, which goes around them."""
    torch.manual_seed(0)
    model = Net(*(Layer(attention, mlp, ("op", "other")) for _ in range(2))).eval()
    for layer in model.layers:
        layer.other = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
    with pytest.raises(LayoutError, match="the input also reaches the output around them"):
        measure(Model(model, blocks="layers.*.other.*"), IDS)
    bare = Net(Bare(), Bare()).eval()
    assert structure_of(bare, IDS, "layers.*").depth == 2


@pytest.mark.slow
def test_lists_that_belong_together_are_suggested_together() -> None:
    torch.manual_seed(0)
    model = Towers(*(Sliced(mlp, scan, ("op", "other")) for _ in range(4))).eval()
    with pytest.raises(DiscoveryError, match=r"agrees with blocks=\['layers\.\*', 'right\.\*'\]"):
        measure(model, IDS)
    run = measure(Model(model, blocks=["layers.*", "right.*"]), IDS, sites=["block.out"])
    assert set(run.table.column("stack").to_pylist()) == {"layers.*", "right.*"}
    with pytest.raises(LayoutError, match="other blocks run beside them"):
        measure(Model(model, blocks="layers.*"), IDS)


def test_tokens_are_not_taken_for_streams() -> None:
    """(batch, heads, tokens, dim): a change of one token reaches all heads, and one place along the tokens."""
    network = next(
        found
        for seed in range(100)
        if (found := Network(seed, Wanted(layout="batch heads tokens dim", mixer="Weak").plain())).ids.shape[1]
        == found.dim // 2
    )
    with pytest.raises(LayoutError, match="agrees with") as error:
        measure(network, network.given)
    assert "'batch streams tokens dim'" in str(error.value)
    assert "'batch tokens streams dim'" not in str(error.value)


JOINED = {
    "stack": lambda a, m: torch.stack([a, m]).sum(0),
    "einsum": lambda a, m: torch.einsum("kbtd,k->btd", torch.stack([a, m]), torch.ones(2)),
    "product": lambda a, m: torch.cat([a, m], -1) @ torch.cat([torch.eye(8), torch.eye(8)]),
    "difference": lambda a, m: a - (-m),
    "gained": lambda a, m: torch.addcmul(a, m, torch.full((8,), 0.5)),
    "interpolated": lambda a, m: torch.lerp(a, m, 0.5),
    "scatter": lambda a, m: a.scatter_add(1, torch.arange(a.shape[1])[None, :, None].expand_as(a), m),
}


class Averaged(nn.Module):
    """A mixer that nothing but its behaviour tells apart from an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x).cumsum(1)))


class Joining(nn.Module):
    """A block that joins a mixer and an MLP before it adds them; with no join, it adds one after the other."""

    def __init__(self, join: str | None) -> None:
        super().__init__()
        self.join, self.norm, self.one = join, nn.LayerNorm(8), Averaged()
        self.other = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.join is None:
            x = x + self.one(h)
            return x + self.other(self.norm(x))
        return x + JOINED[self.join](self.one(h), self.other(h))


@pytest.mark.parametrize("join", JOINED)
def test_an_mlp_that_joins_token_mixing_in_another_form_is_not_left_in_silence(join: str) -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(Joining(join), Joining(join), Joining(None))
    x = torch.randn(2, 6, 8)
    with pytest.raises(UnsupportedOperationError, match=r"joins what 0\.other computes from each token alone"):
        operate(blocks, Surgery(mlp="drop"), inputs=x).__enter__()
    with operate(blocks, Surgery(skip=0.0), inputs=x):
        assert torch.isfinite(blocks(x)).all()


class Inline(Joining):
    """The same with token mixing that no module computes, and with an MLP that may be none either."""

    def __init__(self, join: str | None, mixing: str, is_module: bool = True) -> None:
        super().__init__(join)
        self.mixing, self.is_module = mixing, is_module
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.into, self.out = (nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.mixing == "attention":
            mixed = torch.softmax(self.q(h) @ self.k(h).mT, -1) @ self.v(h)
        else:
            mixed = h.cumsum(1) / 3 if self.mixing == "sum" else torch.tanh(h.cumsum(1) @ self.into)
        if self.join is None:
            x = x + mixed
            return x + self.other(self.norm(x))
        return x + JOINED[self.join](mixed, self.other(h) if self.is_module else torch.tanh(h @ self.into) @ self.out)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize("mixing", ["sum", "weighted", "attention"])
@pytest.mark.parametrize("join", JOINED)
def test_an_mlp_that_joins_token_mixing_without_a_module_is_not_left_in_silence(
    join: str, mixing: str, is_module: bool
) -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Inline(one, mixing, is_module) for one in (join, join, None)))
    name = r"0\.other" if is_module else "its own forward"
    with pytest.raises(UnsupportedOperationError, match=f"joins what {name} computes from each token alone"):
        operate(blocks, Surgery(mlp="drop"), inputs=torch.randn(2, 6, 8)).__enter__()


def test_a_gate_and_values_are_no_mlps() -> None:
    class Gated(Inline):
        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            x = x + torch.sigmoid(self.q(h)) * (torch.softmax(self.q(h) @ self.k(h).mT, -1) @ self.v(h))
            return x if self.join else x + self.other(self.norm(x))

    torch.manual_seed(0)
    blocks = nn.Sequential(Gated(None, "attention"), Gated(None, "attention")).eval()
    x = torch.randn(2, 6, 8)
    with torch.no_grad(), operate(blocks, Surgery(mlp="drop"), inputs=x):
        cut = blocks(x)
    for block in blocks:
        block.join = "without an MLP"
    torch.testing.assert_close(cut, blocks(x).detach())


CONSTANTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "in the product": lambda x, h, w, b: x + F.linear(h, w, b),
    "on the stream": lambda x, h, w, b: (x + b) + F.linear(h, w),
    "on the stream, in one call": lambda x, h, w, b: torch.baddbmm(x + b, h, w.T.expand(len(x), -1, -1)),
    "on the stream, which is scaled": lambda x, h, w, b: (x + b) * 0.5 + F.linear(h, w),
    "behind the sum": lambda x, h, w, b: (x + F.linear(h, w)) + b,
}


class Constant(Layer):
    """The MLP adds a constant, in different places."""

    def __init__(self, form: str) -> None:
        super().__init__(attention, mlp, ("op", "other"))
        self.form, self.b = form, nn.Parameter(torch.randn(DIM))

    def parts(self, x: Tensor, first: bool = True, second: bool = True) -> Tensor:
        x = self.op(self.n1(x)) if not first else x + self.op(self.n1(x))
        h, w = F.gelu(self.other.a(self.n2(x))), self.other.b.weight
        return CONSTANTS[self.form](x, h, w, self.b) if second else F.linear(h, w, self.b)


@pytest.mark.parametrize("form", CONSTANTS)
def test_a_constant_on_the_way_belongs_to_the_branch_or_is_refused(form: str) -> None:
    """It was cut with the stream that it was added to, and the result was off by more than its size."""
    torch.manual_seed(0)
    model = Net(*(Constant(form) for _ in range(2))).eval()
    twin = model(IDS, first=False, second=False).detach()
    if "stream" in form:
        with (
            pytest.raises(UnsupportedOperationError, match=r"gets around blocks.*block 0: torch\..*add.* in layers\.0"),
            operate(Model(model, blocks="layers.*"), Surgery(skip=0.0), inputs=IDS),
        ):
            pass
        return
    with torch.no_grad(), operate(Model(model, blocks="layers.*"), Surgery(skip=0.0), inputs=IDS):
        assert torch.allclose(model(IDS), twin, rtol=1e-5, atol=1e-6)


def test_random_numbers_on_the_stream_are_no_leak() -> None:
    """Dropout that is on in evaluation mode draws other numbers in every pass, and is a gain on the stream."""

    class Dropped(Layer):
        def parts(self, x: Tensor, first: bool = True, second: bool = True) -> Tensor:
            x = F.dropout(x, 0.2, training=True) + self.op(self.n1(x))
            return x + F.dropout(self.other(self.n2(x)), 0.2, training=True)

    torch.manual_seed(0)
    model = Net(*(Dropped(attention, mlp, ("op", "other")) for _ in range(2))).eval()
    assert not with_proven_cuts(structure_of(model, IDS, "layers.*")).stacks[0].carries
