"""The file of a user, without a fault. Reports change single lines of its text, and printed changes are made in it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.exam.reports.parts import Case, next_token, own_initialisation, signals, sine_positions, spectra, text


class Attention(nn.Module):
    """Self-attention written by hand."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        size = width // self.heads
        q, k, v = (f(x).view(batch, tokens, self.heads, size).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(size)
        if self.causal:
            scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)
        probs = scores.softmax(-1)
        return self.o((probs @ v).transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal=causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    """Vectors to class scores, by the mean over tokens or the first token."""

    def __init__(self, body: nn.Module, *, features: int, width: int, classes: int, first: bool = False) -> None:
        super().__init__()
        self.enter, self.body, self.first = nn.Linear(features, width), body, first
        self.place = nn.Parameter(torch.randn(64, width) * 0.3)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        states = self.body(self.enter(x) + self.place[: x.shape[1]])
        return self.head(self.norm(states[:, 0] if self.first else states.mean(1)))


class LanguageModel(nn.Module):
    """Token ids to logits of the next token."""

    def __init__(self, block: Callable[[], nn.Module], depth: int, *, width: int = 32, vocabulary: int = 40) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.randn(32, width) * 0.5)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids) + self.place[: ids.shape[1]]
        for block in self.blocks:
            x = block(x) if mask is None else block(x, mask)
        return self.head(self.norm(x))


def stuck(depth: int) -> Case:
    """A classifier of spectra around torch's own encoder."""
    x, y = spectra()
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    return Case(Classifier(body, features=16, width=64, classes=4, first=True), x, y, F.cross_entropy)


def encoder(depth: int) -> Case:
    """Torch's own encoder."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
    return Case(nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), torch.randn(8, 32, 64))


def stack(depth: int, tokens: int, *, large_values: bool = False) -> Case:
    """A classifier around blocks."""
    x, y = signals(tokens=tokens)
    blocks = nn.Sequential(*(Block(32, 4) for _ in range(depth)))
    for block in blocks if large_values else ():  # values and outputs as large as many codes draw them
        for linear in (block.attention.v, block.attention.o):
            nn.init.normal_(linear.weight, 0.0, 1.0 / math.sqrt(32))
    return Case(Classifier(blocks, features=8, width=32, classes=4), x, y, F.cross_entropy)


def nano(depth: int) -> Case:
    """A language model."""
    return Case(LanguageModel(lambda: Block(32, 4, causal=True), depth), *text(), next_token)


def logits(size: float) -> Case:
    """A language model with weights of queries and keys of some size."""
    model = LanguageModel(lambda: Block(64, 2, causal=True), 3, width=64)
    for block in model.blocks:
        for linear in (block.attention.q, block.attention.k):
            nn.init.normal_(linear.weight, 0.0, size / 8)
    return Case(model, *text(), next_token)


def wide() -> Case:
    """An encoder with one wide head."""
    return Case(LanguageModel(lambda: Block(128, 1), 3, width=128), text()[0])


class Forecaster(nn.Module):
    """Scalar series, tokens first, added to the positions."""

    def __init__(self, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.register_buffer("table", sine_positions(200, width)[:, None])
        self.enter = nn.Linear(1, width)
        layer = nn.TransformerEncoderLayer(width, 4, 96, 0.0)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        own_initialisation(self.body.layers)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.Transformer.generate_square_subsequent_mask(len(x), device=x.device)
        return self.head(self.body(self.enter(x) + self.table[: len(x)], hidden))


def forecaster() -> Case:
    """Sine waves."""
    model = Forecaster()
    x = torch.sin(torch.linspace(0, 20, 60)[:, None] + torch.arange(8.0))[..., None] + 0.1 * torch.randn(60, 8, 1)
    return Case(model, x, doctor={"axes": "tokens batch"})


class Cells(nn.Module):
    """Tokens first, with a mask of shape (sequences, tokens)."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.LayerNorm(32))
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0), depth, enable_nested_tensor=False)
        own_initialisation(self.body.layers)

    def forward(self, src: Tensor, mask: Tensor) -> Tensor:
        states = self.body(self.enter(src), src_key_padding_mask=(mask == 0))
        return F.normalize(states[0], dim=1)


def cells() -> Case:
    """Sequences of which a quarter is padding."""
    mask = torch.ones(8, 40)
    mask[:, 30:] = 0
    return Case(Cells(), {"src": torch.randn(40, 8, 20), "mask": mask})


class Embedder(nn.Module):
    """Ids to one vector each."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.model = LanguageModel(lambda: Block(32, 4), depth)
        del self.model.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed(ids) + self.model.place[: ids.shape[1]]
        for block in self.model.blocks:
            x = block(x)
        return self.model.norm(x).mean(1)


def in_batch(output: Tensor, other: Tensor) -> Tensor:
    """Cross-entropy of finding each input's own pair among the batch."""
    a, b = F.normalize(output, dim=-1), F.normalize(other, dim=-1)
    return F.cross_entropy(a @ b.T * 20, torch.arange(len(a), device=a.device))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the pairs."""
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def pairs() -> Case:
    """An embedder that was trained on pairs."""
    model, (ids, _) = Embedder(), text(16)
    target, optimizer = torch.randn(16, 32), adam(model)
    for _ in range(60):
        optimizer.zero_grad()
        in_batch(model(ids), target).backward()
        optimizer.step()
    return Case(model, ids, target, in_batch, optimizer=adam)


def pull(output: Tensor, other: Tensor) -> Tensor:
    """The mean distance between the embeddings of neighbours, and a variance term."""
    return (output[::2] - output[1::2]).square().mean() + F.relu(1 - output.std(0)).mean()


def agree(output: Tensor) -> Tensor:
    """Distance between the two views, and a variance term."""
    return (output[:, 0] - output[:, 1]).square().mean() + F.relu(1 - output.std(0)).mean()


class Views(nn.Module):
    """Two views of each input through one encoder; returns both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Classifier(nn.Sequential(*(Block(32, 4) for _ in range(2))), features=8, width=32, classes=16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.encoder(x), self.encoder(x + 0.1 * x.flip(-1))], 1)


class Joint(nn.Module):
    """Predicts the embedding by another encoder of its own, with gradients into both."""

    def __init__(self) -> None:
        super().__init__()
        self.context, self.target = Embedder(2), Embedder(2)
        self.predict = nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack([self.predict(self.context(ids.flip(1))), self.target(ids)], 1)


class Convolution(nn.Module):
    """Graph convolution of the library's form: ``conv(x, graph)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        return x + torch.relu(graph @ self.linear(x))


class Graph(nn.Module):
    """Several convolutions."""

    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Convolution(32) for _ in range(depth))

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, graph)
        return x


def graph() -> Case:
    """A random graph."""
    edges = (torch.rand(60, 60) < 0.1).float()
    edges = ((edges + edges.T) > 0).float() + torch.eye(60)
    return Case(Graph(), {"x": torch.randn(60, 32), "graph": edges / edges.sum(1, keepdim=True)})


class Mixing(nn.Module):
    """A pre-norm block with one head, written with ``einsum``."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        scores = torch.einsum("bid,bjd->bij", self.q(y), self.k(y)) / x.shape[-1] ** 0.5
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if keep is not None:
            scores = scores.masked_fill(keep[:, None] == 0, -1e9)
        else:
            scores = scores.masked_fill(causal, -1e9)
        probs = scores.softmax(-1)
        x = x + torch.einsum("bij,bjd->bid", probs, self.v(y))
        return x + self.mlp(self.norm2(x))


def language() -> Case:
    """A language model of such blocks."""
    return Case(LanguageModel(Mixing, 2), *text(), next_token)


def padded() -> Case:
    """The same with padding."""
    ids = text()[0]
    mask = torch.ones_like(ids)
    mask[:, 12:] = 0
    return Case(LanguageModel(Mixing, 2), {"ids": ids, "mask": mask})


class Predictor(nn.Module):
    """A language model inside another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = LanguageModel(lambda: Block(32, 4, causal=True), 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids)


class Pooling(nn.Module):
    """Attention pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.inner = nn.Linear(32, 1), nn.Sequential(*(Mixing() for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        states = self.inner(x)
        return (self.score(states).softmax(1) * states).sum(1, keepdim=True)


def pooled() -> Case:
    """A classifier of pooled states."""
    x, y = signals()
    return Case(Classifier(Pooling(), features=8, width=32, classes=4), x, y, F.cross_entropy)
