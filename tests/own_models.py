"""Models nobody's library knows, written as an architect would write them, with every site spelled out.

Each returns its output; with ``sites`` given, it also appends what happens at every site, computed by plain
arithmetic, so that the tracer can be held against it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

Sites = list[tuple[str, Tensor]]


class SelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.last_probs: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(dim, dim=-1)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        if self.causal:
            scores = scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), -torch.inf)
        self.last_probs = scores.softmax(dim=-1)
        return self.out((self.last_probs @ value).transpose(1, 2).reshape(batch, tokens, dim))


class Block(nn.Module):
    """Pre-norm, post-norm, parallel, or without skips."""

    def __init__(self, dim: int, heads: int, kind: str, causal: bool) -> None:
        super().__init__()
        self.kind = kind
        self.attention = SelfAttention(dim, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.sites: Sites | None = None

    def note(self, site: str, tensor: Tensor) -> None:
        if self.sites is not None:
            self.sites.append((site, tensor.clone()))

    def forward(self, x: Tensor) -> Tensor:
        self.note("block.in", x)
        out = getattr(self, f"_{self.kind}")(x)
        self.note("block.out", out)
        return out

    def _pre(self, x: Tensor) -> Tensor:
        branch = self.attention(self.norm1(x))
        self.note("attention.out", branch)
        x = x + branch
        self.note("attention.sum", x)
        branch = self.mlp(self.norm2(x))
        self.note("mlp.out", branch)
        x = x + branch
        self.note("mlp.sum", x)
        return x

    def _post(self, x: Tensor) -> Tensor:
        branch = self.attention(x)
        self.note("attention.out", branch)
        x = branch + x
        self.note("attention.sum", x)
        x = self.norm1(x)
        branch = self.mlp(x)
        self.note("mlp.out", branch)
        x = torch.add(x, branch)
        self.note("mlp.sum", x)
        return self.norm2(x)

    def _parallel(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        both = self.attention(normed) + self.mlp(normed)
        self.note("both.out", both)
        x = x + both
        self.note("both.sum", x)
        return x

    def _inplace(self, x: Tensor) -> Tensor:
        branch = self.attention(self.norm1(x))
        self.note("attention.out", branch)
        branch += x
        self.note("attention.sum", branch)
        x = branch
        branch = self.mlp(self.norm2(x))
        self.note("mlp.out", branch)
        x += branch
        self.note("mlp.sum", x)
        return x

    def _bare(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


class GPT(nn.Module):
    """A hand-written language model; ``kind`` is the kind of its blocks."""

    def __init__(
        self, kind: str = "pre", *, dim: int = 32, heads: int = 4, depth: int = 3, causal: bool = True
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, dim)
        self.positions = nn.Parameter(torch.randn(64, dim) / 8)
        self.blocks = nn.ModuleList(Block(dim, heads, kind, causal) for _ in range(depth))
        self.used = depth
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 100, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks[: self.used]:
            x = block(x)
        return self.head(self.norm(x))


class InlineGPT(nn.Module):
    """Blocks that are no modules: attention and MLP lists walked by one loop, over a stream that comes in."""

    def __init__(self, *, dim: int = 32, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(SelfAttention(dim, heads, True) for _ in range(depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = x + attention(x)
            x = x + mlp(x)
        return self.norm(x)


def checkpointed(model: nn.Module, **options: bool) -> None:
    """Gradient checkpoints of a model of transformers, under the name that its version has."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options or None)  # type: ignore[operator]


def ids(batch: int = 2, tokens: int = 11, *, seed: int = 0) -> Tensor:
    return torch.randint(5, 90, (batch, tokens), generator=torch.Generator().manual_seed(seed))
