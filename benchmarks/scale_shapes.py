"""Shapes of large models and the classes of the hub, as the page on scale assumes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A decoder with gated MLPs and grouped keys, or a mixture of such MLPs.

    Attributes:
        name: as in the table.
        blocks: how many.
        width: of the stream.
        inner: of one MLP.
        heads: per block.
        key_heads: per block.
        vocabulary: tokens known.
        experts: MLPs per block.
        active: MLPs a token goes through.
    """

    name: str
    blocks: int
    width: int
    inner: int
    heads: int
    key_heads: int
    vocabulary: int
    experts: int = 1
    active: int = 1

    @property
    def attention(self) -> int:
        """Parameters of Q, K, V and O of one block."""
        return 2 * self.width**2 + 2 * self.width**2 * self.key_heads // self.heads

    @property
    def block(self) -> int:
        """Parameters of one block."""
        return self.attention + 3 * self.width * self.inner * self.experts

    @property
    def active_block(self) -> int:
        """Parameters of one block that a token meets."""
        return self.attention + 3 * self.width * self.inner * self.active

    @property
    def parameters(self) -> int:
        """Of the whole, with embedding and unembedding."""
        return self.blocks * self.block + 2 * self.vocabulary * self.width

    @property
    def tensors(self) -> int:
        """How many the file holds: four of attention, three per MLP, two norms; three around."""
        return self.blocks * (6 + 3 * self.experts) + 3


SHAPES = (
    Shape("8B (Llama 3)", 32, 4096, 14336, 32, 8, 128256),
    Shape("70B (Llama 3)", 80, 8192, 28672, 64, 8, 128256),
    Shape("405B (Llama 3.1)", 126, 16384, 53248, 128, 8, 128256),
    Shape("1T, dense", 136, 25600, 76800, 200, 8, 200000),
    Shape("1T, 384 experts, 8 active", 60, 7168, 2048, 64, 64, 160000, experts=384, active=8),
)
"""The first three as published; the two of a trillion are shapes of that size, not a particular model."""


@dataclass(frozen=True)
class HubClass:
    """An assumed share of the checkpoints of a hub."""

    name: str
    share: float
    shape: Shape


HUB = (
    HubClass("0.1B", 0.55, Shape("0.1B", 12, 768, 2048, 12, 12, 32000)),
    HubClass("1B", 0.27, Shape("1B", 16, 2048, 8192, 32, 8, 64000)),
    HubClass("8B", 0.16, SHAPES[0]),
    HubClass("70B", 0.019, SHAPES[1]),
    HubClass("405B", 0.001, SHAPES[2]),
)
CHECKPOINTS = 2_000_000
"""How many; the true number grows by the day, and every figure below is proportional to it."""
