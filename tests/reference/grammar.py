"""Small networks drawn from a grammar of blocks, each as numbers from which two programs are built independently.

``grammar_torch`` builds a plain module from a :class:`Network`, ``grammar_mpmath`` follows the same definitions in as
many digits as the answer needs. Neither imports rankscope.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

NORMS = ("none", "layer", "rms", "rms_none")
PLACEMENTS = ("pre", "post")
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "swiglu")
MASKS = ("complete", "causal", "window", "changing", "strided", "debruijn", "random")
TOKENS = ("different", "close", "identical", "positions")
SKIPS = ("none", "cut", "kept", "gain")
ROTARY_BASE = 100.0


@dataclass(frozen=True)
class Network:
    """One network and its input.

    Attributes:
        seed: from which all numbers are drawn; with the other attributes it is the whole network.
        tokens: length of the sequence.
        width: of the stream.
        heads: each of width ``head_width``.
        blocks: how many.
        norm: ``rms_none`` is ``nn.RMSNorm(eps=None)``, whose epsilon is that of the model's number format.
        placement: of the norms, before or after the branches.
        activation: of the MLP, or ``none`` for a block without one.
        mask: sequence of masks over the blocks.
        start: how the tokens of the input differ.
        skip: ``none`` has no skip in its code, ``cut`` has one that ``exact(skip=0)`` is asked to remove, ``gain`` is
            ``0.5 x + f(x)``.
        scale: factor of the scores.
        cap: soft cap of the scores, ``cap tanh(score / cap)``, or 0.
        sinks: a learned score per head that takes probability and has no value.
        bias: size of all biases except those of queries and keys; 0 has none.
        score_bias: size of the biases of queries and keys.
        cancelling: the second half of the heads is the first half with the opposite sign.
        rotary: positions rotate queries and keys.
        fused: through ``scaled_dot_product_attention``, where neither sinks nor a cap are in the way.
        dtype: number format of the weights and the input.
    """

    seed: int
    tokens: int
    width: int
    heads: int
    head_width: int
    blocks: int
    norm: str
    placement: str
    activation: str
    mask: str
    start: str
    skip: str
    scale: float
    cap: float
    sinks: bool
    bias: float
    score_bias: float
    cancelling: bool
    rotary: bool
    fused: bool
    dtype: str
    weights: tuple[dict[str, Tensor], ...] = field(init=False, repr=False, compare=False)
    visible: tuple[Tensor, ...] = field(init=False, repr=False, compare=False)
    input: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        object.__setattr__(self, "weights", tuple(self._weights(draw) for _ in range(self.blocks)))
        object.__setattr__(self, "visible", tuple(self._mask(index, draw) for index in range(self.blocks)))
        object.__setattr__(self, "input", self._input(draw))

    @property
    def format(self) -> torch.dtype:
        """The number format as torch names it."""
        return torch.float32 if self.dtype == "float32" else torch.float64

    @property
    def hidden(self) -> int:
        """Width inside the MLP."""
        return self.width + 1

    @property
    def is_equal(self) -> bool:
        """Whether all tokens are equal after every block by construction, so that residuals are exactly zero."""
        rows_sum_alike = not self.sinks or (self.mask == "complete" and not self.rotary)
        alone = self.skip in ("none", "cut")
        return (self.start == "identical" and rows_sum_alike) or (self.cancelling and alone)

    def described(self) -> str:
        """Every choice in one line."""
        hidden = ("weights", "visible", "input")
        return " ".join(f"{item.name}={getattr(self, item.name)}" for item in fields(self) if item.name not in hidden)

    def _normal(self, draw: torch.Generator, *shape: int, by: float) -> Tensor:
        return (torch.randn(*shape, dtype=torch.float64, generator=draw) * by).to(self.format)

    def _weights(self, draw: torch.Generator) -> dict[str, Tensor]:
        inner = self.heads * self.head_width
        w = {name: self._normal(draw, inner, self.width, by=self.width**-0.5) for name in ("q", "k", "v")}
        w["o"] = self._normal(draw, self.width, inner, by=inner**-0.5)
        for name in ("q", "k"):
            w[f"{name}.bias"] = self._normal(draw, inner, by=self.score_bias)
        w["v.bias"] = self._normal(draw, inner, by=self.bias)
        w["o.bias"] = self._normal(draw, self.width, by=self.bias)
        w["sink"] = self._normal(draw, self.heads, by=1.0)
        if self.cancelling:
            half = inner // 2
            for name in ("q", "k", "v", "q.bias", "k.bias", "v.bias"):
                w[name][half:] = w[name][:half]
            w["o"][:, half:] = -w["o"][:, :half]
            w["sink"][self.heads // 2 :] = w["sink"][: self.heads // 2]
        w["up"] = self._normal(draw, self.hidden, self.width, by=self.width**-0.5)
        w["gate"] = self._normal(draw, self.hidden, self.width, by=self.width**-0.5)
        w["down"] = self._normal(draw, self.width, self.hidden, by=self.hidden**-0.5)
        w["up.bias"] = self._normal(draw, self.hidden, by=self.bias)
        w["down.bias"] = self._normal(draw, self.width, by=self.bias)
        for name in ("norm1", "norm2"):
            w[name] = 1 + self._normal(draw, self.width, by=0.2)
            w[f"{name}.bias"] = self._normal(draw, self.width, by=self.bias)
        return w

    def _mask(self, index: int, draw: torch.Generator) -> Tensor:
        """Which key a query sees; every query sees some."""
        query, key = torch.arange(self.tokens)[:, None], torch.arange(self.tokens)[None, :]
        window = (query - key).abs() <= 1
        block = 2 if self.tokens % 2 == 0 else self.tokens
        choices = {
            "complete": torch.ones(self.tokens, self.tokens, dtype=torch.bool),
            "causal": key <= query,
            "window": window,
            "changing": (key <= query, window, key >= query, (query - key).abs() <= 2)[index % 4],
            "strided": (query // block == key // block, query % block == key % block)[index % 2],
            "debruijn": (key == (2 * query) % self.tokens) | (key == (2 * query + 1) % self.tokens),
            "random": (torch.rand(self.tokens, self.tokens, generator=draw) < 0.5) | (query == key),
        }
        return choices[self.mask]

    def _input(self, draw: torch.Generator) -> Tensor:
        common = torch.randn(1, self.width, dtype=torch.float64, generator=draw)
        own = torch.randn(self.tokens, self.width, dtype=torch.float64, generator=draw)
        spread = {"different": 1.0, "close": 1e-5, "identical": 0.0, "positions": 0.5}[self.start]
        return (common + spread * own).to(self.format)


def draw_network(seed: int) -> Network:
    """The network of this seed: every choice is drawn, ordinary ones more often than strange ones."""
    draw = random.Random(seed)
    mask = draw.choices(MASKS, (6, 3, 2, 3, 3, 3, 2))[0]
    tokens = draw.choice((2, 4, 8)) if mask == "debruijn" else draw.randint(2, 8)
    if mask == "strided":
        tokens = draw.choice((4, 4, 6, 8))
    heads = draw.randint(1, 4)
    capped = draw.random() < 0.15
    sinks = draw.random() < 0.15
    pure = draw.random() < 0.35
    return Network(
        seed=seed,
        tokens=tokens,
        width=draw.randint(2, 8),
        heads=heads,
        head_width=2 * draw.randint(1, 2),
        blocks=draw.randint(2, 6),
        norm="none" if pure else draw.choice(NORMS),
        placement=draw.choice(PLACEMENTS),
        activation="none" if pure else draw.choice(ACTIVATIONS),
        mask=mask,
        start=draw.choices(TOKENS, (6, 2, 1, 2))[0],
        skip=draw.choices(SKIPS, (5, 3, 1, 1))[0],
        scale=round(10 ** draw.uniform(-1.0, 2.301), 4),
        cap=draw.choice((1.0, 5.0, 30.0)) if capped else 0.0,
        sinks=sinks,
        bias=draw.choice((0.0, 0.3, 0.3)),
        score_bias=draw.choices((0.0, 0.3, 10.0, 50.0), (3, 4, 1, 1))[0],
        cancelling=heads % 2 == 0 and draw.random() < 0.15,
        rotary=draw.random() < 0.1,
        fused=draw.random() < 0.6,
        dtype=draw.choice(("float32", "float64", "float64")),
    )
