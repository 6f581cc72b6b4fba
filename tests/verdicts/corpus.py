"""Activation stacks whose state is known by construction, for the confusion matrix of verdicts.

A kind builds one stack from a generator of random numbers; its label is part of the declaration and is fixed before any
verdict is drawn. Sizes, strengths, the position of what is odd and the number of blocks are all drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import DEFAULT_TOKEN_METRICS, METRICS, evaluate
from rankscope.runs.rows import RowWriter
from rankscope.verdicts import Verdict, judge_rows

SPECS = [METRICS[name] for name in DEFAULT_TOKEN_METRICS]


@dataclass
class Stack:
    """Activations after each block, ``(sequences, tokens, dim)`` each."""

    layers: list[Tensor]
    keep: Tensor | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of stack: its name, what it is in words, the right code, and how one is built."""

    name: str
    words: str
    label: str
    build: Callable[[Draw], Stack]


KINDS: dict[str, Kind] = {}


def kind(words: str, label: str) -> Callable[[Callable[[Draw], Stack]], Callable[[Draw], Stack]]:
    """Declare a kind of stack."""

    def register(build: Callable[[Draw], Stack]) -> Callable[[Draw], Stack]:
        name = build.__name__
        KINDS[name] = Kind(name, words, label, build)
        return build

    return register


@dataclass
class Draw:
    """Random numbers of one stack, and its sizes."""

    seed: int
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.depth = self.integer(3, 7)
        self.sequences = self.integer(1, 5)
        self.tokens = (16, 32, 64, 128, 160)[self.integer(0, 5)]
        self.dim = (32, 64, 128, 256)[self.integer(0, 4)]

    def integer(self, low: int, high: int) -> int:
        """Uniform on low, ..., high - 1."""
        return int(torch.randint(low, high, (), generator=self.generator))

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=self.generator))

    def power(self, low: float, high: float) -> float:
        """Uniform in the logarithm."""
        return math.exp(self.uniform(math.log(low), math.log(high)))

    def gaussian(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def iid(self) -> Tensor:
        """Independent Gaussian tokens."""
        return self.gaussian(self.sequences, self.tokens, self.dim)

    def common(self) -> Tensor:
        """One vector per sequence, with entries of the size of those of a token."""
        return self.gaussian(self.sequences, 1, self.dim)

    def some(self, count: int) -> Tensor:
        """Positions of a few tokens."""
        return torch.randperm(self.tokens, generator=self.generator)[:count]


def same_in_every_block(draw: Draw, make: Callable[[], Tensor]) -> Stack:
    return Stack([make() for _ in range(draw.depth)])


@kind("independent Gaussian tokens", "healthy")
def iid(draw: Draw) -> Stack:
    return same_in_every_block(draw, draw.iid)


@kind("independent tokens and a common vector 2.5 to 8 times as large", "mean offset")
def offset(draw: Draw) -> Stack:
    size = draw.power(2.5, 8.0)
    return same_in_every_block(draw, lambda: draw.iid() + size * draw.common())


@kind("independent tokens, one of them 30 to 3000 times as large", "huge token")
def huge_token(draw: Draw) -> Stack:
    place, size = draw.integer(0, draw.tokens), draw.power(30.0, 3000.0)

    def make() -> Tensor:
        x = draw.iid()
        x[:, place] *= size
        return x

    return same_in_every_block(draw, make)


@kind("one token huge in two channels, the others independent", "huge token")
def massive_activation(draw: Draw) -> Stack:
    place, channels, size = draw.integer(0, draw.tokens), draw.some(2) % draw.dim, draw.power(300.0, 3000.0)

    def make() -> Tensor:
        x = draw.iid()
        x[:, place, channels] = size
        return x

    return same_in_every_block(draw, make)


@kind("independent tokens, one channel 30 to 300 times as large", "huge channel")
def huge_channel(draw: Draw) -> Stack:
    channel, size = draw.integer(0, draw.dim), draw.power(30.0, 300.0)

    def make() -> Tensor:
        x = draw.iid()
        x[..., channel] *= size
        return x

    return same_in_every_block(draw, make)


@kind("half precision, one channel constant at 500 to 6000, the others independent", "huge channel")
def constant_channel(draw: Draw) -> Stack:
    channel, size = draw.integer(0, draw.dim), draw.power(500.0, 6000.0)
    dtype = (torch.bfloat16, torch.float16)[draw.integer(0, 2)]

    def make() -> Tensor:
        x = draw.iid()
        x[..., channel] = size
        return x.to(dtype)

    return same_in_every_block(draw, make)


@kind("equal tokens with a relative noise of 1e-4 to 0.02", "collapsed")
def collapsed(draw: Draw) -> Stack:
    noise = draw.power(1e-4, 0.02)
    return same_in_every_block(draw, lambda: draw.common() + noise * draw.iid())


@kind("independent, then equal with noise from some block on", "collapsed")
def collapsed_late(draw: Draw) -> Stack:
    noise, first = draw.power(1e-4, 0.02), draw.integer(1, draw.depth)
    return Stack([draw.iid() if block < first else draw.common() + noise * draw.iid() for block in range(draw.depth)])


@kind("equal in every second block, independent in the others", "collapsed")
def periodic(draw: Draw) -> Stack:
    noise = draw.power(1e-4, 0.02)
    return Stack([draw.common() + noise * draw.iid() if block % 2 else draw.iid() for block in range(draw.depth)])


@kind("some of two to eight sequences collapsed, the others independent", "collapsed")
def some_sequences(draw: Draw) -> Stack:
    draw.sequences = draw.integer(2, 9)
    count, noise = draw.integer(1, draw.sequences), draw.power(1e-4, 0.02)

    def make() -> Tensor:
        x = draw.iid()
        x[:count] = (draw.common() + noise * draw.iid())[:count]
        return x

    return same_in_every_block(draw, make)


@kind("padded: the tokens that count are equal, padding is not", "collapsed")
def collapsed_content(draw: Draw) -> Stack:
    noise, length = draw.power(1e-4, 0.02), draw.integer(4, draw.tokens)
    keep = (torch.arange(draw.tokens) < length).expand(draw.sequences, -1)
    made = [torch.where(keep[..., None], draw.common() + noise * draw.iid(), draw.iid()) for _ in range(draw.depth)]
    return Stack(made, keep)


@kind("padded: padding is equal, the tokens that count are not", "healthy")
def collapsed_padding(draw: Draw) -> Stack:
    length = draw.integer(draw.tokens // 4, draw.tokens)
    keep = (torch.arange(draw.tokens) < length).expand(draw.sequences, -1)
    return Stack([torch.where(keep[..., None], draw.iid(), draw.common()) for _ in range(draw.depth)], keep)


@kind("residual times 0.35 to 0.7 per block, from 0.9 to above 0.04", "collapsing")
def falling(draw: Draw) -> Stack:
    factor = draw.uniform(0.35, 0.7)
    # Deep enough for a threefold fall over the second half, and above the threshold at the end.
    draw.depth = math.floor(math.log(0.04 / 0.9) / math.log(factor)) + 1
    return Stack([with_residual(draw, 0.9 * factor**block) for block in range(draw.depth)])


@kind("residual halved per block until below 0.025", "collapsed")
def fallen(draw: Draw) -> Stack:
    draw.depth = draw.integer(7, 10)
    return Stack([with_residual(draw, 0.9 * 0.5**block) for block in range(draw.depth)])


@kind("a common vector to which every block adds the same", "mean offset")
def growing_offset(draw: Draw) -> Stack:
    draw.depth = draw.integer(6, 13)
    return Stack([with_residual(draw, 1.0 / math.sqrt(1.0 + (0.7 * block) ** 2)) for block in range(draw.depth)])


def with_residual(draw: Draw, residual: float) -> Tensor:
    """Tokens of this relative residual, but for chance."""
    return math.sqrt(max(0.0, 1.0 - residual**2)) * draw.common() + residual * draw.iid()


@kind("equal in float32 up to its rounding", "floor")
def rounding(draw: Draw) -> Stack:
    return same_in_every_block(draw, lambda: draw.common() * (1 + 2.0**-23 * draw.iid()))


@kind("exactly zero from some block on", "vanished")
def zero(draw: Draw) -> Stack:
    first = draw.integer(0, draw.depth)
    return Stack([draw.iid() if block < first else torch.zeros_like(draw.iid()) for block in range(draw.depth)])


@kind("NaN or infinity in one token from some block on", "not finite")
def not_finite(draw: Draw) -> Stack:
    stack, first = iid(draw), draw.integer(0, draw.depth)
    for layer in stack.layers[first:]:
        layer[0, draw.integer(0, draw.tokens), 0] = (math.nan, math.inf)[draw.integer(0, 2)]
    return stack


@kind("55% to 97% of the tokens equal to within 1%, the others independent", "copies")
def mostly_equal(draw: Draw) -> Stack:
    others, noise = draw.some(max(1, round(draw.tokens * draw.uniform(0.03, 0.45)))), draw.power(1e-6, 0.01)

    def make() -> Tensor:
        x = draw.common() + noise * draw.iid()
        x[:, others] = draw.iid()[:, others]
        return x

    return same_in_every_block(draw, make)


@kind("one token with 20% to 48% of the energy, the others equal to within 1%", "copies")
def sink_and_copies(draw: Draw) -> Stack:
    place, share, noise = draw.integer(0, draw.tokens), draw.uniform(0.2, 0.48), draw.power(1e-4, 0.01)

    def make() -> Tensor:
        x = draw.common() + noise * draw.iid()
        size = math.sqrt(share / (1.0 - share) * (draw.tokens - 1))
        x[:, place] = size * draw.gaussian(draw.sequences, draw.dim)
        return x

    return same_in_every_block(draw, make)


@kind("two huge tokens, the others equal to within 1%", "copies")
def two_sinks(draw: Draw) -> Stack:
    places, size, noise = draw.some(2), draw.power(30.0, 1000.0), draw.power(1e-4, 0.01)

    def make() -> Tensor:
        x = draw.common() + noise * draw.iid()
        x[:, places] = size * draw.iid()[:, places]
        return x

    return same_in_every_block(draw, make)


@kind("two to eight clusters of copies within 1%", "clusters")
def clusters(draw: Draw) -> Stack:
    count, noise = draw.integer(2, min(9, draw.tokens // 4 + 1)), draw.power(1e-6, 0.01)
    member = torch.arange(draw.tokens) % count

    def make() -> Tensor:
        return draw.gaussian(draw.sequences, count, draw.dim)[:, member] + noise * draw.iid()

    return same_in_every_block(draw, make)


@kind("directions equal to within 1%, lengths log-normal", "same direction")
def one_direction(draw: Draw) -> Stack:
    noise, width = draw.power(1e-4, 0.01), draw.uniform(0.3, 1.0)

    def make() -> Tensor:
        length = torch.exp(width * draw.gaussian(draw.sequences, draw.tokens, 1))
        return length * (draw.common() + noise * draw.iid())

    return same_in_every_block(draw, make)


@kind("tokens on a line or in a plane through the origin, signs drawn, noise of 1% to 3%", "few directions")
def few_directions(draw: Draw) -> Stack:
    rank, noise = draw.integer(1, 3), draw.power(0.01, 0.03)

    def make() -> Tensor:
        basis = torch.linalg.qr(draw.gaussian(draw.sequences, draw.dim, rank)).Q.mT * math.sqrt(draw.dim)
        return draw.gaussian(draw.sequences, draw.tokens, rank) @ basis + noise * draw.iid()

    return same_in_every_block(draw, make)


@kind("two to seven independent tokens", "healthy")
def few_tokens(draw: Draw) -> Stack:
    draw.tokens = draw.integer(2, 8)
    return same_in_every_block(draw, draw.iid)


@kind("independent tokens, a third of which are copies of other ones, in small groups", "healthy")
def repeated_words(draw: Draw) -> Stack:
    source = torch.arange(draw.tokens)
    copies = draw.some(draw.tokens // 3)
    source[copies] = draw.some(draw.tokens // 3).roll(1)
    return same_in_every_block(draw, lambda: draw.iid()[:, source])


@kind("independent tokens of which nine in ten entries are zero", "healthy")
def sparse(draw: Draw) -> Stack:
    draw.dim = 256

    def make() -> Tensor:
        x = draw.iid()
        return x * (torch.rand(x.shape, generator=draw.generator) < 0.1)

    return same_in_every_block(draw, make)


def table_of(stack: Stack) -> pa.Table:
    """The rows that ``measure``'s battery has of a stack."""
    writer = RowWriter()
    floor = float_floor(stack.layers[0].dtype)
    for layer, x in enumerate(stack.layers):
        reading = evaluate(SPECS, Tokens(x, stack.keep), floor)
        for spec, values, statuses in zip(SPECS, reading.values, reading.statuses, strict=True):
            place = {"metric": spec.name, "site": "block.out", "stack": None, "layer": layer, "first_sequence": 0}
            writer.add(values=values.numpy(), statuses=statuses.numpy(), head_axis=False, **place)
    return writer.table()


def facts_of(stack: Stack) -> dict[str, Any]:
    """What a verb tells :func:`judge_rows` besides the rows."""
    count = Tokens(stack.layers[0], stack.keep).count
    return {
        "floor_relative": float_floor(stack.layers[0].dtype),
        "lengths": {None: {number: int(length) for number, length in enumerate(count.tolist())}},
        "dim": stack.layers[0].shape[-1],
    }


def verdict_on(stack: Stack) -> Verdict:
    """The verdict of ``measure``'s battery on a stack."""
    return judge_rows(table_of(stack), **facts_of(stack))


def verdicts_of(kind: Kind, seeds: Sequence[int]) -> list[Verdict]:
    """One verdict per seed."""
    return [verdict_on(kind.build(Draw(seed))) for seed in seeds]
