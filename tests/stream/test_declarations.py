"""Declared layouts are tested like guessed ones, hints are tried before they are printed, calls are not yet blocks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankscope as rs
from rankscope.errors import DiscoveryError, LayoutError, RankscopeError
from tests.flat_calls import flat

DIM, HEADS = 8, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        seen = x if past is None else torch.cat([past, x], dim=1)
        query = self.qkv(x)[..., :DIM]
        key, value = self.qkv(seen)[..., DIM:].chunk(2, dim=-1)
        query, key, value = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in (query, key, value))
        scores = query @ key.mT / math.sqrt(DIM / HEADS)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, tokens, DIM))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(DIM), nn.LayerNorm(DIM), Attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), past)
        return x + self.mlp(self.norm2(x))


class FlatBlock(Block):
    """Takes ``(tokens batch) dim``."""

    def forward(self, x: Tensor, past: Any = None) -> Tensor:
        wide = self.norm1(x).view(-1, past, DIM).transpose(0, 1)
        x = x + self.attention(wide).transpose(0, 1).reshape(-1, DIM)
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.positions = nn.Embedding(40, DIM), nn.Parameter(torch.randn(64, DIM))
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.states: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        """Keeps the state after each block, as ``batch tokens dim``."""
        self.states = []
        return self.through(self.embedding(ids) + self.positions[: ids.shape[1]])

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            self.states.append(x)
        return x


class Flat(Net):
    def __init__(self) -> None:
        super().__init__(FlatBlock)

    def through(self, x: Tensor) -> Tensor:
        rows, x = len(x), x.transpose(0, 1).reshape(-1, DIM)
        for block in self.blocks:
            x = block(x, rows)
            self.states.append(x.view(-1, rows, DIM).transpose(0, 1))
        return x


class WindowsFirst(Net):
    def through(self, x: Tensor) -> Tensor:
        rows, x = len(x), torch.cat(x.split(4, dim=1))
        for block in self.blocks:
            x = block(x)
            self.states.append(torch.cat(x.split(rows), dim=1))
        return x


class Chunks(Net):
    """Runs the tokens in parts of four; later ones see the earlier ones, kept in a cache."""

    def through(self, x: Tensor) -> Tensor:
        cache: list[Tensor | None] = [None] * len(self.blocks)
        done = []
        for part in x.split(4, dim=1):
            for place, block in enumerate(self.blocks):
                before = cache[place]
                cache[place] = part if before is None else torch.cat([before, part], dim=1)
                part = block(part, before)
            done.append(part)
        return torch.cat(done, dim=1)


class Siamese(Net):
    def through(self, x: Tensor) -> Tensor:
        return super().through(x) + super().through(x.flip(1))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Net() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        return sum(tower(ids) for tower in self.towers)  # type: ignore[no-any-return]


def ids(rows: int = 3, tokens: int = 12) -> Tensor:
    return torch.randint(40, (rows, tokens), generator=torch.Generator().manual_seed(1))


def assert_as_by_hand(model: Net, **options: Any) -> None:
    run = flat(rs.measure, model, ids(), metrics=["relative_residual"], sites=["block.out"], **options)
    with torch.no_grad():
        model(ids())
    rows = run.select(metric="relative_residual", site="block.out").to_pylist()
    found = {(row["layer"], row["sequence"]): row["value"] for row in rows}
    expected = {
        (layer, number): float((x - x.mean(0)).norm() / x.norm())
        for layer, state in enumerate(model.states)
        for number, x in enumerate(state.double())
    }
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("build", "wrong", "hint"),
    [
        (Flat, "(batch tokens) dim", "(tokens batch) dim"),
        (WindowsFirst, "(batch tokens) tokens dim", "(tokens batch) tokens dim"),
        (WindowsFirst, "(streams batch) tokens dim", "(tokens batch) tokens dim"),
    ],
)
def test_item_2_the_only_hint_is_right_and_a_wrong_declaration_refused(build: type[Net], wrong: str, hint: str) -> None:
    model = build().eval()
    for declared in (None, rs.Stream(wrong)):
        with pytest.raises(LayoutError) as refused:
            rs.measure(rs.Model(model, stream=declared), ids())
        assert re.findall(r"rankscope\.Stream\('([^']*)'\)", str(refused.value))[-1:] == [hint]
        assert str(refused.value).count("What was seen agrees") == 1
    assert_as_by_hand(model, stream=rs.Stream(hint))


@pytest.mark.parametrize("build", [Chunks, Siamese], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("declared", [None, "batch tokens dim"])
def test_item_2_calls_on_parts_of_the_tokens_are_not_counted_as_blocks(build: type[Net], declared: str | None) -> None:
    with pytest.raises(LayoutError, match=r"blocks\.0 .*takes nothing of what blocks\.1 returned.*more than once"):
        rs.measure(rs.Model(build().eval(), stream=declared), ids())


def test_item_2_two_stacks_with_one_pattern_are_told_apart() -> None:
    model = Towers().eval()
    with pytest.raises(LayoutError, match=r"two residual streams.*blocks='towers\.0\.blocks\.\*'") as refused:
        rs.measure(model, ids())
    assert "blocks='towers.1.blocks.*'" in str(refused.value)
    run = rs.measure(rs.Model(model, blocks="towers.1.blocks.*"), ids(), metrics=["relative_residual"])
    assert run.curve("relative_residual", "block.out").layers.tolist() == [0, 1]


class InAPlainList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(40, DIM), [Block() for _ in range(2)]

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, dtype=torch.complex64) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        z = self.embedding(ids).to(torch.complex64)
        for layer in self.layers:
            z = z + layer(z.mean(1, keepdim=True))
        return z.real


class Tangents(Net):
    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = torch.func.jvp(block, (x,), (torch.ones_like(x),))
        return x


class Nested(Net):
    def __init__(self) -> None:
        super().__init__(lambda: nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True))

    def through(self, x: Tensor) -> Tensor:
        return super().through(torch.nested.nested_tensor(list(x))).to_padded_tensor(0.0)


class Jagged(Net):
    """Attention on jagged tensors turns them into nested ones inside."""

    def through(self, x: Tensor) -> Tensor:
        x = torch.nested.nested_tensor(list(x), layout=torch.jagged)
        for block in self.blocks:
            q = block.norm1(x).unflatten(-1, [HEADS, DIM // HEADS]).transpose(1, 2)
            x = x + torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2)
            x = x + block.mlp(block.norm2(x))
        return torch.stack(x.unbind())


class PartsOnly(Net):
    """Blocks whose parts the model calls itself."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.attention(block.norm1(x))
            x = x + block.mlp(block.norm2(x))
        return x


class Functional(nn.Module):
    """No modules but one embedding: blocks are functions of parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.weight = nn.Embedding(40, DIM), nn.Parameter(torch.randn(2, DIM, DIM))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for weight in self.weight:
            x = x + (x @ weight @ x.mT).softmax(-1) @ x
            x = x + torch.relu(x @ weight)
        return x


class OfTokens(nn.Module):
    """Takes and returns one tensor per token."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        return list(self.block(torch.stack(xs, 1)).unbind(1))


class ListOfTokens(Net):
    def __init__(self) -> None:
        super().__init__(OfTokens)

    def through(self, x: Tensor) -> Tensor:
        xs = list(x.unbind(1))
        for block in self.blocks:
            xs = block(xs)
        return torch.stack(xs, 1)


def test_a_stream_in_a_list_of_tokens_is_not_read_as_its_first_token() -> None:
    """The hint of the refusal was ``(batch tokens) dim``, which measured token 0 alone."""
    with pytest.raises(LayoutError, match=r"returns \d+ tensors of one shape.*one tensor per token") as error:
        rs.measure(rs.Model(ListOfTokens().eval(), blocks="blocks.*"), ids())
    assert "(batch tokens)" not in str(error.value)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
@pytest.mark.parametrize(
    ("build", "why"),
    [
        (InAPlainList, r"layers is a plain list with 2 modules \(Block\).*nn\.ModuleList"),
        (Complex, r"'layers\.\*' take tensors of complex64"),
        (Tangents, r"inside torch\.func"),
        (Nested, "makes nested tensors"),
        (Jagged, "makes nested tensors"),
        (Functional, r"A block has to be a module that is called.*nn\.ModuleList"),
        (PartsOnly, r"'blocks\.\*' are never called themselves, only their parts"),
    ],
)
def test_item_4_the_true_reason_is_named(build: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(RankscopeError, match=why):
        rs.measure(build().eval(), ids())
    if build is InAPlainList:
        fixed = InAPlainList()
        fixed.layers = nn.ModuleList(fixed.layers)  # type: ignore[assignment]
        assert rs.measure(fixed.eval(), ids(), metrics=["relative_residual"]).code
    elif build is Complex:
        with pytest.raises(DiscoveryError, match="complex64"):
            rs.measure(rs.Model(Complex().eval(), blocks="layers.*"), ids())
