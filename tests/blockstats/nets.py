"""A small decoder whose blocks run alone or in pairs under activation checkpoints, and what it should have read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rankscope import blockstats
from rankscope.blockstats import BlockStats

VOCABULARY, WIDTH, DEPTH, SEQUENCES, TOKENS = 101, 32, 4, 8, 16
RATIOS = ("relative_residual", "between_groups", "stream_rms", "relative_write")


def _save_products(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _save_products)
    ),
}
COMPILED = ("eager", "blocks", "whole")


class Block(nn.Module):
    """Pre-norm, with separate projections, so that tensor parallelism can split them."""

    def __init__(self, width: int = WIDTH, head: int = 8) -> None:
        super().__init__()
        self.head = head
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (
            part(normed).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """With `kept`, two blocks run under one checkpoint: with one, early stop hides a hook that counts twice."""

    def __init__(self, kept: Callable[..., Any] | None = None, depth: int = DEPTH, width: int = WIDTH) -> None:
        super().__init__()
        self.kept = kept
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm: nn.Module | None = nn.LayerNorm(width)
        self.head: nn.Module | None = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for number in range(0, len(self.layers), 2):
            pair = self.layers[number : number + 2]
            x = _through(pair, x) if self.kept is None else self.kept(partial(_through, pair), x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def _through(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def decoder(kept: str = "none") -> Decoder:
    torch.manual_seed(0)
    return Decoder(CHECKPOINTS[kept])


def batches(count: int, sequences: int = SEQUENCES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (sequences, TOKENS), generator=generator) for _ in range(count)]


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), ids.flatten())


def compiled(model: nn.Module, way: str, backend: str = "aot_eager") -> nn.Module:
    """The model as it is, with every block compiled, or compiled as a whole. A graph break is an error."""
    if way == "blocks":
        for block in model.layers:  # type: ignore[union-attr]
            block.compile(backend=backend, fullgraph=True)
    return torch.compile(model, backend=backend, fullgraph=True) if way == "whole" else model  # type: ignore[return-value]


def expected(streams: list[tuple[Tensor, Tensor]], window: int = TOKENS) -> dict[str, float]:
    """The ratios in float64, from the streams after and before one block, by another formula than the sums."""
    after = torch.cat([x.double().unflatten(1, (-1, window)).flatten(0, 1) for x, _ in streams])
    before = torch.cat([x.double().unflatten(1, (-1, window)).flatten(0, 1) for _, x in streams])
    means = after.mean(1)
    size = after.norm()
    return {
        "relative_residual": float((after - means[:, None]).norm() / size),
        "between_groups": float((means - means.mean(0)).norm() * window**0.5 / size),
        "stream_rms": float(after.square().mean().sqrt()),
        "relative_write": float((after - before).norm() / size),
        "largest": float(after.abs().max()),
    }


def of_block(values: Mapping[str, float], block: int) -> dict[str, float]:
    return {name.split("/")[0]: x for name, x in values.items() if name.split("/")[1:] == [str(block)]}


def furthest(found: Mapping[str, float], wanted: Mapping[str, float], depth: int = DEPTH) -> float:
    """The largest relative difference of a ratio, over all blocks. One entry, the largest, may differ by a rounding."""
    for i in range(depth):
        assert abs(found[f"largest/{i}"] / wanted[f"largest/{i}"] - 1) < 4 * torch.finfo(torch.float32).eps
    pairs = [(found[f"{name}/{i}"], wanted[f"{name}/{i}"]) for name in RATIOS for i in range(depth)]
    return max(abs(one / other - 1) for one, other in pairs)


def attached(model: Decoder, **options: Any) -> BlockStats:
    stats = blockstats.attach(model.layers, WIDTH, **options)
    stats.count()
    return stats
