"""The parts networks are put together from: attentions, an MLP, blocks and a language model around them.

Each part has ``forward`` for the network and ``by_hand`` or ``twin`` for its twin. Hostile forms override one method
and stay ordinary in all others, so that two of them can be paired by inheriting from both.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hostile import twin as plain
from tests.hostile.twin import Cut, Twin

VOCABULARY, DIM, HEADS, TOKENS, BATCH = 40, 8, 2, 7, 2


class Attention(nn.Module):
    """Softmax written out; ``hidden`` is true for keys that no query may see, ``(batch, 1, 1, tokens)``."""

    def __init__(self, dim: int = DIM, heads: int = HEADS, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, tokens, dim = x.shape
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(dim, -1))
        return q, k, v

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        mixed = self.mix(q, k, v, self._hides(x.shape[1], hidden))
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def _hides(self, tokens: int, hidden: Tensor | None) -> Tensor | None:
        if not self.causal:
            return hidden
        causal = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        return causal if hidden is None else causal | hidden

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(dim=-1) @ v

    def by_hand(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        q, k, v = (plain.split(part, self.heads) for part in plain.linear(self.qkv, x).chunk(3, dim=-1))
        if self.causal:
            later = plain.later(x.shape[1])
            hidden = later if hidden is None else later | hidden
        return plain.linear(self.out, plain.merge(self.mix_by_hand(q, k, v, hidden, cut)))

    def mix_by_hand(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, cut: Cut) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("bhqk,bhkd->bhqd", plain.probabilities(scores, hidden, cut), v)


class Mlp(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def by_hand(self, x: Tensor) -> Tensor:
        return plain.linear(self.down, plain.gelu(plain.linear(self.up, x)))


class Block(nn.Module):
    """Pre-norm with two skips; ``join`` writes the skip, ``joined`` is the same by hand with a gain on what it carries.

    ``to_tokens`` and ``from_tokens`` lead from the layout of the stream to (batch, tokens, dim) and back.
    """

    dim = DIM

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = self.make_norm(), self.make_norm()
        self.attention = self.make_attention()
        self.mlp = self.make_mlp()

    def make_norm(self) -> nn.Module:
        return nn.LayerNorm(self.dim)

    def make_attention(self) -> nn.Module:
        return Attention(self.dim)

    def make_mlp(self) -> nn.Module:
        return Mlp(self.dim)

    def to_tokens(self, x: Tensor) -> Tensor:
        return x

    def from_tokens(self, x: Tensor) -> Tensor:
        return x

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * x + branch

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = self.join(x, self.from_tokens(self.attention(self.norm1(self.to_tokens(x)), hidden)))
        return self.join(x, self.from_tokens(self.mlp(self.norm2(self.to_tokens(x)))))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        branch = self.attention.by_hand(plain.norm(self.norm1, x, cut), cut, hidden)
        x = self.joined(x, branch, cut.skip)
        return self.mlp_twin(x, cut)

    def mlp_twin(self, x: Tensor, cut: Cut) -> Tensor:
        """An MLP that is left out takes its sub-layer along: the skip stays as the only way through."""
        if not cut.mlp:
            return self.joined(x, torch.zeros_like(x), 1.0)
        return self.joined(x, self.mlp.by_hand(plain.norm(self.norm2, x, cut)), cut.skip)


class Net(nn.Module):
    """Token ids to logits over a list of blocks."""

    def __init__(self, block: type[Block] = Block, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, block.dim)
        self.positions = nn.Parameter(torch.empty(16, block.dim))
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm = nn.LayerNorm(block.dim)
        self.head = nn.Linear(block.dim, 5, bias=False)

    def calls(self) -> list[Block]:
        """The blocks in the order in which they run."""
        return list(self.blocks)

    def start(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.positions[: ids.shape[1]]

    def close(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.calls():
            x = block(x)
        return self.close(x)

    def start_twin(self, ids: Tensor) -> Tensor:
        return self.embed.weight[ids] + self.positions[: ids.shape[1]]

    def close_twin(self, x: Tensor) -> Tensor:
        return plain.linear(self.head, plain.norm(self.norm, x))

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer, block in enumerate(self.calls()):
            x = block.twin(x, cut.at(layer))
            states.append(x)
        return Twin(self.close_twin(x), states)


def drawn(model: nn.Module, seed: int) -> nn.Module:
    """Every parameter drawn anew, so that no gain is one and no bias zero; attention well away from uniform."""
    draw = torch.Generator().manual_seed(seed)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=draw, dtype=torch.float64).to(like.dtype)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.copy_(normal(parameter) * (1.0 if "embed" in name else 1.6 / math.sqrt(parameter.shape[-1])))
            else:
                parameter.copy_((0.0 if "bias" in name else 0.9) + 0.2 * normal(parameter))
    return model


def ids(batch: int = BATCH, tokens: int = TOKENS, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))
