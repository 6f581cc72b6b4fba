"""The network with frozen attention and norm scales: linear in the stream, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from rankscope.ext.paths.maps import IDENTITY, Chain
from rankscope.models.heads import HeadWeights

Origin = Literal["embedding", "mlp", "cross_attention", "bias", "other"]


@dataclass(frozen=True, eq=False)
class FrozenHeads:
    r"""Attention with frozen probabilities, :math:`\sum_h P_h X W_{V,h} W_{O,h}`. Exact.

    Attributes:
        probs: (batch, heads, query, key).
        values: (dim, groups * d_v).
        output: (heads * d_v, dim).
        groups: number of key-value groups.
    """

    probs: Tensor
    values: Tensor
    output: Tensor
    groups: int

    @classmethod
    def of(cls, weights: HeadWeights, probs: Tensor, dtype: torch.dtype) -> FrozenHeads:
        """From head weights (kept as views if the dtype allows) and probabilities."""
        values = weights.W_V_groups.permute(1, 0, 2).flatten(1)
        return cls(probs.to(dtype), values.to(dtype), weights.W_O.flatten(0, 1).to(dtype), weights.W_V_groups.shape[0])

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.probs.shape[1]

    def mixed(self, x: Tensor) -> Tensor:
        """``P_h x W_V,h`` of every head: (sums, batch, tokens, dim) to (sums, batch, tokens, heads * d_v)."""
        sums, batch, tokens, _ = x.shape
        value = (x @ self.values).view(sums, batch, tokens, self.groups, -1)
        width = value.shape[-1]
        value = value.permute(1, 3, 2, 0, 4).reshape(batch, self.groups, 1, tokens, sums * width)
        probs = self.probs.view(batch, self.groups, -1, *self.probs.shape[-2:])
        out: Tensor = (probs @ value).view(batch, self.heads, tokens, sums, width)
        return out.permute(3, 0, 2, 1, 4).reshape(sums, batch, tokens, self.heads * width)

    def __call__(self, x: Tensor, head: int | None = None) -> Tensor:
        """All heads together, or one: (sums, batch, tokens, dim) to the same."""
        if head is None:
            return self.mixed(x) @ self.output
        width = self.output.shape[0] // self.heads
        group = head // (self.heads // self.groups)
        value = x @ self.values[:, group * width : (group + 1) * width]
        return self.probs[:, head] @ value @ self.output[head * width : (head + 1) * width]

    def each(self, x: Tensor) -> Tensor:
        """Every head separately: (batch, tokens, dim) to (heads, batch, tokens, dim)."""
        output = self.output.view(self.heads, -1, self.output.shape[-1])
        return torch.einsum("bthv,hvd->hbtd", self.by_head(self.mixed(x[None])[0]), output)

    def by_head(self, x: Tensor) -> Tensor:
        """(..., heads * d_v) as (..., heads, d_v)."""
        return x.reshape(*x.shape[:-1], self.heads, -1)

    def shift(self, weights: HeadWeights) -> Tensor:
        """The contribution of value and output biases: (batch, tokens, dim)."""
        dtype = self.probs.dtype
        mass = self.probs.sum(dim=-1).transpose(1, 2)
        carried = (mass[..., None] * weights.b_V.to(dtype)).flatten(-2) @ self.output
        return carried + weights.b_O.to(dtype)


@dataclass(frozen=True, eq=False)
class SeenAttention:
    """One attention branch as the model itself computed it; (batch, tokens, dim) each.

    Attributes:
        read: the input of attention.
        given: the output of its output projection, before any norm or gain; None if that was not seen.
        summed: the stream after the add.
    """

    read: Tensor
    given: Tensor | None
    summed: Tensor


@dataclass(frozen=True, eq=False)
class FrozenStep:
    """One step of the stream: it is passed on, and something may be added.

    Attributes:
        skip: the map on the skip; None if surgery has removed it.
        heads: attention that is added, if any.
        before: maps the stream to the input of attention.
        after: maps the output of attention to what is added.
        bias: (batch, tokens, dim), the constant part: norm shifts, value and output biases.
        source: (batch, tokens, dim), what an MLP, or the other side of a decoder, adds.
        origin: where ``source`` comes from.
        seen: the attention branch as the model computed it, if requested.
    """

    skip: Chain | None = IDENTITY
    heads: FrozenHeads | None = None
    before: Chain = IDENTITY
    after: Chain = IDENTITY
    bias: Tensor | None = None
    source: Tensor | None = None
    origin: Origin = "other"
    seen: SeenAttention | None = None

    def passed(self, x: Tensor) -> Tensor:
        """The stream passed on without attention; (sums, batch, tokens, dim)."""
        return torch.zeros_like(x) if self.skip is None else self.skip.linear(x)

    def attended(self, x: Tensor, head: int | None = None) -> Tensor:
        """What attention, or one head of it, adds for this stream; (sums, batch, tokens, dim)."""
        assert self.heads is not None
        return self.after.linear(self.heads(self.before.linear(x), head))

    def attended_shifted(self, sums: Tensor, head: int | None = None) -> Tensor:
        """What attention, or one head, adds for sums by length (lengths, ...), each moved to the next length."""
        longer = torch.zeros_like(sums)
        longer[1:] = self.attended(sums[:-1], head)
        return longer

    def attended_each(self, x: Tensor) -> Tensor:
        """The same head by head: (batch, tokens, dim) to (heads, batch, tokens, dim)."""
        assert self.heads is not None
        return self.after.linear(self.heads.each(self.before.linear(x)))

    def constants(self) -> list[tuple[Origin, Tensor]]:
        """The constants that enter the stream here."""
        constants: list[tuple[Origin, Tensor]] = []
        if self.bias is not None:
            constants.append(("bias", self.bias))
        if self.source is not None:
            constants.append((self.origin, self.source))
        return constants

    def total(self, x: Tensor) -> Tensor:
        """The whole step on a stream (batch, tokens, dim), including constants."""
        y = self.passed(x[None])
        if self.heads is not None:
            y = y + self.attended(x[None])
        for _, constant in self.constants():
            y = y + constant
        return y[0]


@dataclass(frozen=True, eq=False)
class FrozenBlock:
    """The steps of one block, and the output stream in the model itself.

    Attributes:
        stack: name of the stack.
        layer: number of the block; the final norm has the number of the last block.
        steps: in order.
        out: (batch, tokens, dim), as the model computed it.
        is_final: whether this is the norm after the last block.
    """

    stack: str | None
    layer: int
    steps: tuple[FrozenStep, ...]
    out: Tensor
    is_final: bool = False

    @property
    def site(self) -> str:
        """The site at which ``out`` was read."""
        return "final" if self.is_final else "block.out"


@dataclass(eq=False)
class FrozenNetwork:
    """All blocks of one stack on one batch.

    Attributes:
        entry: (batch, tokens, dim), the stream that enters the first block.
        blocks: in order, with the final norm last if there is one.
    """

    entry: Tensor
    blocks: list[FrozenBlock] = field(default_factory=list)

    @property
    def steps(self) -> Sequence[FrozenStep]:
        """Every step, in order."""
        return [step for block in self.blocks for step in block.steps]

    @property
    def attention(self) -> list[tuple[int, int]]:
        """Block and position in :attr:`steps` of every step with attention."""
        places, position = [], 0
        for block in self.blocks:
            for step in block.steps:
                if step.heads is not None:
                    places.append((block.layer, position))
                position += 1
        return places

    @property
    def out(self) -> Tensor:
        """The stream at the end, as the model computed it."""
        return self.blocks[-1].out

    def total(self) -> Tensor:
        """The stream at the end, from the frozen maps."""
        x = self.entry
        for step in self.steps:
            x = step.total(x)
        return x
