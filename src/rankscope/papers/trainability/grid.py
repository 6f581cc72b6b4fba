"""The designs of the map, and what each is judged by. Frozen descriptions; no tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

COORDINATES = ("source", "depth", "width", "heads", "gain", "std", "seed")
RESIDUAL = "log10_relative_residual"


@dataclass(frozen=True, order=True)
class Cell:
    """One design of the map: a BERT with MLPs and LayerNorms after each sum, its skips scaled by ``gain``.

    Attributes:
        depth: blocks.
        width: of the stream; the MLPs are four times as wide.
        heads: of a block.
        gain: of every skip, in training too.
        std: standard deviation of a weight at initialisation; by default 1/sqrt(width), which keeps the size of a token
            through a square matrix.
    """

    depth: int
    width: int
    heads: int
    gain: float
    std: float = 0.0

    def __post_init__(self) -> None:
        if self.std == 0.0:
            object.__setattr__(self, "std", float(self.width**-0.5))

    @property
    def name(self) -> str:
        """As it is written in messages and file names."""
        return f"depth{self.depth}-width{self.width}-heads{self.heads}-gain{self.gain:g}-std{self.std:.3g}"

    def at(self) -> dict[str, str | int | None]:
        """Its columns in a table."""
        names = {"gain": f"{self.gain:g}", "std": f"{self.std:.4g}"}
        return {"depth": self.depth, "width": self.width, "heads": self.heads, **names}


@dataclass(frozen=True)
class Size:
    """How large the map is and how long each network is trained.

    Attributes:
        depths: of the designs at every width.
        deep: further depths, at the middle width only.
        widths: of the designs.
        heads: of the designs at every width.
        other_heads: tried at the middle width besides, at the depths ``sliced``.
        other_stds: of weights, tried at the middle width besides, at the depths ``sliced``.
        sliced: those depths.
        gains: of the skips.
        seeds: of weights, data and order of the data.
        steps: of the optimiser, for every network the same.
        drawn: seeds of a prediction.
        probed: sequences on which collapse is measured before training.
        learnt: sequences to learn from.
        held: other sequences, by which a network is judged.
    """

    depths: tuple[int, ...] = (2, 4, 8)
    deep: tuple[int, ...] = (16,)
    widths: tuple[int, ...] = (32, 64, 128)
    heads: int = 4
    other_heads: tuple[int, ...] = (2,)
    other_stds: tuple[float, ...] = (0.02,)
    sliced: tuple[int, ...] = (2, 4)
    gains: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 2.0)
    seeds: int = 2
    steps: int = 120
    drawn: int = 3
    probed: int = 2
    learnt: int = 1000
    held: int = 200

    def cells(self) -> Iterator[Cell]:
        """Every design: all widths, then other weights, heads and depths at the middle width."""
        middle = self.widths[len(self.widths) // 2]
        for depth in self.depths:
            yield from (Cell(depth, width, self.heads, gain) for width in self.widths for gain in self.gains)
        for depth in self.sliced:
            yield from (Cell(depth, middle, self.heads, gain, std) for std in self.other_stds for gain in self.gains)
            yield from (Cell(depth, middle, heads, gain) for heads in self.other_heads for gain in self.gains)
        yield from (Cell(depth, middle, self.heads, gain) for depth in self.deep for gain in self.gains)

    def to_json(self) -> dict[str, Any]:
        """All fields in plain JSON types."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


FULL = Size()
SMALL = Size(
    depths=(1, 4),
    deep=(),
    widths=(16,),
    heads=2,
    other_heads=(),
    other_stds=(),
    gains=(0.0, 1.0),
    seeds=1,
    steps=30,
    drawn=2,
    probed=1,
    learnt=200,
    held=50,
)
