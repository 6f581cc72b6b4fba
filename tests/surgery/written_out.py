"""Small models that carry their attention in four ways, and the same models with every cut written out.

The models know nothing of cuts. ``forward_with`` computes what a cut model must give, from the model's own weights,
by the formulas: no hooks, no modules, no code of the library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KINDS = ("pre", "post", "parallel")
CARRIERS = ("eager", "sdpa", "torch", "torch with weights")
DIM, HEADS, WIDTH = 12, 3, 4


class Attention(nn.Module):
    """One set of weights, four ways to attend."""

    def __init__(self, carrier: str, causal: bool) -> None:
        super().__init__()
        self.carrier, self.causal = carrier, causal
        self.weights = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1) if self.causal else None
        if self.carrier.startswith("torch"):
            shows = self.carrier == "torch with weights"
            out: Tensor = self.weights(x, x, x, attn_mask=hidden, need_weights=shows)[0]
            return out
        query, key, value = split(self, x)
        if self.carrier == "sdpa":
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        else:
            scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH)
            if hidden is not None:
                scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
            mixed = scores.softmax(dim=-1) @ value
        return self.weights.out_proj(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, kind: str, carrier: str, causal: bool) -> None:
        super().__init__()
        self.kind = kind
        self.attention = Attention(carrier, causal)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "pre":
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        if self.kind == "post":
            x = self.norm1(x + self.attention(x))
            return self.norm2(self.mlp(x) + x)
        y = self.norm1(x)
        return x + (self.attention(y) + self.mlp(y))


class Model(nn.Module):
    def __init__(self, kind: str, carrier: str, causal: bool, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind, carrier, causal) for _ in range(depth))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def build(kind: str, carrier: str, causal: bool, depth: int = 2) -> Model:
    """A model in float64 whose norms do something and whose attention is far from uniform."""
    torch.manual_seed(1)
    model = Model(kind, carrier, causal, depth).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@dataclass(frozen=True)
class Cut:
    """What is written out; the visible keys as a function of the model's own."""

    attention_skip: float = 1.0
    mlp_skip: float = 1.0
    drop: bool = False
    norm: str = "keep"
    mask: str | None = None
    mode: str = "replace"
    temperature: float = 1.0
    uniform: bool = False
    centred: bool = False
    scale: float = 1.0
    heads: tuple[int, ...] = ()


@dataclass
class Run:
    """The output, and the attention probabilities of each block."""

    out: Tensor
    probs: list[Tensor] = field(default_factory=list)


def split(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, _ = x.shape
    joint = F.linear(x, attention.weights.in_proj_weight, attention.weights.in_proj_bias)
    query, key, value = (part.view(batch, tokens, HEADS, WIDTH).transpose(1, 2) for part in joint.split(DIM, dim=-1))
    return query, key, value


def sees(mask: str, tokens: int) -> Tensor:
    rows = [
        [{"causal": j <= i, "window(2)": abs(i - j) <= 2, "complete": True}[mask] for j in range(tokens)]
        for i in range(tokens)
    ]
    return torch.tensor(rows)


def visible(cut: Cut, tokens: int, causal: bool) -> Tensor:
    own = sees("causal" if causal else "complete", tokens)
    if cut.mask is None:
        return own
    new = sees(cut.mask, tokens)
    return {"replace": new, "intersect": own & new, "unite": own | new}[cut.mode]


def attend(attention: Attention, x: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    query, key, value = split(attention, x)
    seen = visible(cut, x.shape[1], attention.causal).double()
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(WIDTH) / cut.temperature
    weights = seen * (scores - scores.detach().amax(dim=-1, keepdim=True)).exp()
    uniform = (seen / seen.sum(dim=-1, keepdim=True)).expand(weights.shape)
    probs = uniform if cut.uniform else weights / weights.sum(dim=-1, keepdim=True)
    if cut.centred:
        probs = cut.scale * (probs - uniform)
    elif cut.scale != 1.0:
        probs = uniform + cut.scale * (probs - uniform)
    kept = torch.tensor([float(head not in cut.heads) for head in range(HEADS)], dtype=torch.float64)
    probs = probs * kept[:, None, None]
    mixed = torch.einsum("bhqk,bhkd->bqhd", probs, value).reshape(x.shape)
    return F.linear(mixed, attention.weights.out_proj.weight, attention.weights.out_proj.bias), probs


def normalise(norm: nn.LayerNorm, x: Tensor, cut: Cut) -> Tensor:
    if cut.norm == "identity":
        return x
    if cut.norm == "scale":
        return x / x.norm(dim=-1, keepdim=True)
    if cut.norm == "rms":
        return x / (x.norm(dim=-1, keepdim=True) / math.sqrt(DIM))
    return F.layer_norm(x, (DIM,), norm.weight, norm.bias, norm.eps)


def forward_with(model: Model, x: Tensor, cuts: list[Cut]) -> Run:
    """The model under one cut per block."""
    run = Run(x)
    for block, cut in zip(model.blocks, cuts, strict=True):
        x, probs = _block_with(block, x, cut)
        run.probs.append(probs.detach())
    run.out = F.layer_norm(x, (DIM,), model.norm.weight, model.norm.bias, model.norm.eps)
    return run


def _block_with(block: Block, x: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    if block.kind == "parallel":
        y = normalise(block.norm1, x, cut)
        branch, probs = attend(block.attention, y, cut)
        return cut.attention_skip * x + branch + (0 if cut.drop else block.mlp(y)), probs
    branch, probs = attend(block.attention, x if block.kind == "post" else normalise(block.norm1, x, cut), cut)
    x = cut.attention_skip * x + branch
    if block.kind == "post":
        x = normalise(block.norm1, x, cut)
    if cut.drop:
        x = x if cut.mlp_skip == 0 else cut.mlp_skip * x
    else:
        x = cut.mlp_skip * x + block.mlp(x if block.kind == "post" else normalise(block.norm2, x, cut))
    return (normalise(block.norm2, x, cut) if block.kind == "post" else x), probs
