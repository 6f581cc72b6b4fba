"""Networks with several residual streams per token, written by hand; each records its streams and mixing matrices."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DIM, HEADS, DEPTH, WORDS = 16, 2, 3, 50
LAYOUTS = (
    "batch tokens streams dim",
    "batch streams tokens dim",
    "streams batch tokens dim",
    "(batch streams) tokens dim",
    "(streams batch) tokens dim",
)
KINDS = ("static", "dynamic", "doubly stochastic", "altup")


def given(rows: int = 3, tokens: int = 7) -> Tensor:
    return torch.randint(WORDS, (rows, tokens), generator=torch.Generator().manual_seed(1))


def laid(x: Tensor, layout: str) -> Tensor:
    """(batch, tokens, streams, dim) in another layout."""
    orders = {"batch tokens streams dim": (0, 1, 2, 3), "batch streams tokens dim": (0, 2, 1, 3),
              "streams batch tokens dim": (2, 0, 1, 3)}  # fmt: skip
    if layout in orders:
        return x.permute(orders[layout])
    order = (0, 2, 1, 3) if layout.startswith("(batch") else (2, 0, 1, 3)
    return x.permute(order).flatten(0, 1)


def lifted(x: Tensor, layout: str, rows: int) -> Tensor:
    """Back to (batch, tokens, streams, dim)."""
    if layout == "batch tokens streams dim":
        return x
    if layout == "batch streams tokens dim":
        return x.transpose(1, 2)
    if layout == "streams batch tokens dim":
        return x.permute(1, 2, 0, 3)
    if layout.startswith("(batch"):
        return x.unflatten(0, (rows, -1)).transpose(1, 2)
    return x.unflatten(0, (-1, rows)).permute(1, 2, 0, 3)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))


class Connection(nn.Module):
    """Reads, mixes and writes streams (batch, tokens, streams, dim); keeps the matrix it used."""

    def __init__(self, kind: str, streams: int) -> None:
        super().__init__()
        self.kind, self.streams = kind, streams
        self.read, self.write = nn.Parameter(torch.randn(streams)), nn.Parameter(torch.randn(streams))
        self.mix = nn.Parameter(torch.eye(streams) + 0.3 * torch.randn(streams, streams))
        self.from_tokens = nn.Linear(DIM, streams, bias=False)
        self.used = torch.empty(0)

    def matrix(self, x: Tensor) -> Tensor:
        moved = self.from_tokens(x).tanh()
        if self.kind == "static":
            return self.mix.expand(*x.shape[:2], -1, -1)
        if self.kind == "dynamic":
            return self.mix + moved
        scores = (self.mix + moved).exp()
        for _ in range(60):
            scores = scores / scores.sum(-1, keepdim=True)
            scores = scores / scores.sum(-2, keepdim=True)
        return scores

    def forward(self, x: Tensor, branch: nn.Module) -> Tensor:
        matrix = self.matrix(x)
        self.used = matrix.detach()
        out = branch(torch.einsum("btsd,s->btd", x, self.read))
        return torch.matmul(matrix, x) + out[:, :, None] * self.write[:, None]


class Block(nn.Module):
    """Two connections; streams come and go in the given layout."""

    def __init__(self, kind: str, streams: int, layout: str) -> None:
        super().__init__()
        self.layout, self.rows = layout, 0
        self.attention, self.mlp = Attention(), Mlp()
        self.first, self.second = Connection(kind, streams), Connection(kind, streams)

    def forward(self, x: Tensor) -> Tensor:
        x = lifted(x, self.layout, self.rows)
        x = self.second(self.first(x, self.attention), self.mlp)
        return laid(x, self.layout).contiguous()

    @property
    def used(self) -> Tensor:
        """The matrix of the whole block."""
        return self.second.used @ self.first.used


class AltUpBlock(Block):
    """Predicts all streams, runs a layer on the first, and corrects all of them; sums are in place, as published."""

    def forward(self, x: Tensor) -> Tensor:
        x = lifted(x, self.layout, self.rows)
        coefs = self.first.from_tokens(x[:, :, 0]).tanh()[..., None] * self.first.mix
        predictions = torch.matmul(coefs, x)
        predictions += x
        active = predictions[:, :, 0]
        layer = active + self.attention(active)
        layer = layer + self.mlp(layer)
        gains = 1.0 + self.second.write * self.second.from_tokens(layer).tanh()
        corrected = gains[..., None] * (layer - predictions[:, :, 0])[:, :, None]
        corrected += predictions
        # layer - active carries nothing of the streams: only what attention and MLP added.
        self._used = torch.eye(len(self.first.mix)).to(x) + coefs.detach()
        return laid(corrected, self.layout).contiguous()

    @property
    def used(self) -> Tensor:
        return self._used


class Network(nn.Module):
    """Embeds, spreads over streams, runs the blocks, and reads the sum of the streams."""

    def __init__(self, kind: str = "static", streams: int = 4, layout: str = LAYOUTS[0]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layout = layout
        self.embed, self.starts = nn.Embedding(WORDS, DIM), nn.Parameter(torch.randn(streams, DIM))
        make = AltUpBlock if kind == "altup" else Block
        self.blocks = nn.ModuleList(make(kind, streams, layout) for _ in range(DEPTH))
        self.head = nn.Linear(DIM, WORDS)
        self.seen: list[Tensor] = []
        self.double().eval()

    def forward(self, ids: Tensor) -> Tensor:
        x = laid(self.embed(ids)[:, :, None] + self.starts, self.layout).contiguous()
        self.seen = []
        for block in self.blocks:
            block.rows = len(ids)
            x = block(x)
            self.seen.append(lifted(x, self.layout, len(ids)).detach())
        return self.head(lifted(x, self.layout, len(ids)).sum(2))


class Writer(Connection):
    """A connection in two steps, of which only the second is a module call: it takes the branch's output alone."""

    def prepare(self, x: Tensor, layout: str, rows: int) -> tuple[Tensor, Tensor]:
        x = lifted(x, layout, rows)
        matrix = self.matrix(x)
        self.used = matrix.detach()
        return torch.einsum("btsd,s->btd", x, self.read), torch.matmul(matrix, x)

    def forward(self, out: Tensor, mixed: Tensor, layout: str) -> Tensor:  # type: ignore[override]
        return laid(mixed + out[:, :, None] * self.write[:, None], layout)


class Written(nn.Module):
    """No module takes the streams: the model's own loop mixes them, and modules write branches to them."""

    def __init__(self, kind: str = "static", streams: int = 4, layout: str = LAYOUTS[3]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layout = layout
        self.embed, self.starts = nn.Embedding(WORDS, DIM), nn.Parameter(torch.randn(streams, DIM))
        branches = [make() for _ in range(DEPTH) for make in (Attention, Mlp)]
        self.layers = nn.ModuleList(nn.ModuleList([branch, Writer(kind, streams)]) for branch in branches)
        self.head = nn.Linear(DIM, WORDS)
        self.seen: list[Tensor] = []
        self.double().eval()

    def forward(self, ids: Tensor) -> Tensor:
        x, rows = laid(self.embed(ids)[:, :, None] + self.starts, self.layout), len(ids)
        self.seen = []
        for number, (branch, writer) in enumerate(self.layers):
            read, mixed = writer.prepare(x, self.layout, rows)
            x = writer(branch(read), mixed, self.layout)
            if number % 2:
                self.seen.append(lifted(x, self.layout, rows).detach())
        return self.head(lifted(x, self.layout, rows).sum(2))


class Ensemble(nn.Module):
    """Four members side by side, each with its own copy of every token: not streams, though a token reaches all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.starts = nn.Embedding(WORDS, DIM), nn.Parameter(torch.randn(4, DIM))
        self.blocks = nn.ModuleList(_Member() for _ in range(DEPTH))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)[None] + self.starts[:, None, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(0))


class _Member(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return x + self.mlp(x)


def relative_residual(x: Tensor) -> Tensor:
    """Of the last axis but one, from the definition, for (..., items, dim)."""
    x = x.double()
    apart = x - x.mean(-2, keepdim=True)
    return apart.norm(dim=(-2, -1)) / x.norm(dim=(-2, -1))


def rounds(dtype: torch.dtype) -> float:
    return 64 * math.sqrt(DIM) * torch.finfo(dtype).eps
