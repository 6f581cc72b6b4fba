"""What the graph of a mask says about collapse: a frozen record, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rankscope.runs._frozen import freeze, thaw
from rankscope.runs.showing import show_of
from rankscope.views.text import document_text

AGREEMENT_KEY = "layers_to_1e-3"


@dataclass(frozen=True)
class MaskGraph:
    """Facts about one mask over a number of tokens.

    A number that is not known is None; ``ranges`` then gives bounds for it, and ``statuses`` always says how
    a number was computed, or why it was not.

    Attributes:
        mask: the expression.
        tokens: number of tokens.
        edges: number of pairs (query, key) that see each other.
        self_loops: whether each token sees itself.
        centres: number of tokens that reach every token.
        first_centres: the first few of them.
        parts: number of strongly connected parts.
        strongly_connected: every token reaches every token.
        quasi_strongly_connected: some token reaches every token.
        radius: smallest number of layers after which one token has reached all.
        diameter: largest number of layers that any token needs; None if infinite.
        lambda_2: modulus of the second eigenvalue of uniform attention under the mask: the late factor per layer.
        spectral_gap: 1 - ``lambda_2``, computed without cancellation.
        transient: layers before the late factor governs random tokens.
        layers_to_agreement: layers until random tokens agree to a relative residual of 1e-3.
        log10_decay: log10 of their relative residual, from layer 0 on, as far as it was simulated.
        ranges: for each number that is not known, its bounds ``(lower, upper)``; None for an unknown bound.
        statuses: how each number was computed.
        equal_after: layers after which all tokens are exactly equal; None if that never happens, or if it was not
            checked.
    """

    mask: str
    tokens: int
    edges: int
    self_loops: bool
    centres: int
    first_centres: tuple[int, ...]
    parts: int
    strongly_connected: bool
    quasi_strongly_connected: bool
    radius: int | None
    diameter: int | None
    lambda_2: float | None
    spectral_gap: float | None
    transient: int | None
    layers_to_agreement: int | None
    log10_decay: tuple[float, ...]
    ranges: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    statuses: Mapping[str, str] = field(default_factory=dict)
    equal_after: int | None = None

    def __post_init__(self) -> None:
        for name in ("ranges", "statuses", "first_centres", "log10_decay"):
            object.__setattr__(self, name, freeze(getattr(self, name)))

    def to_json(self) -> dict[str, Any]:
        """One JSON object."""
        return {
            "kind": "graph",
            "mask": self.mask,
            "tokens": self.tokens,
            "edges": self.edges,
            "self_loops": self.self_loops,
            "centres": {"count": self.centres, "first": list(self.first_centres)},
            "parts": self.parts,
            "strongly_connected": self.strongly_connected,
            "quasi_strongly_connected": self.quasi_strongly_connected,
            "radius": self.radius,
            "diameter": self.diameter,
            "lambda_2": self.lambda_2,
            "spectral_gap": self.spectral_gap,
            "transient": self.transient,
            AGREEMENT_KEY: self.layers_to_agreement,
            "equal_after": self.equal_after,
            "ranges": thaw(self.ranges),
            "statuses": thaw(self.statuses),
            "log10_decay": thaw(self.log10_decay),
        }

    def __str__(self) -> str:
        return document_text(show_of("graph").document([self]))

    @property
    def verdict(self) -> str:
        """One sentence on what the mask does to tokens."""
        if not self.quasi_strongly_connected:
            return "No token reaches all others: tokens never agree under this mask alone."
        if self.lambda_2 == 1:
            return "Tokens never agree under this mask alone: it is periodic, and differences go round without fading."
        late = _equal(self) if self.lambda_2 == 0 else _late(self)
        if self.layers_to_agreement is not None:
            plural = "" if self.layers_to_agreement == 1 else "s"
            return f"Tokens agree to 1e-3 after {self.layers_to_agreement:,} layer{plural}; {late}."
        lower, upper = self.ranges[AGREEMENT_KEY]
        ends = f"more than {count_words(lower)}" if upper is None else f"{count_words(lower)} to {count_words(upper)}"
        return f"Tokens agree to 1e-3 after {ends} layers; {late}."


class MaskGraphs(tuple[MaskGraph, ...]):
    """Several masks side by side, as the command line prints them."""

    __slots__ = ()

    @property
    def passed(self) -> bool:
        """Always: a mask cannot fail."""
        return True

    @property
    def brief(self) -> str:
        """One sentence per mask."""
        return "\n".join(f"{graph.mask}: {graph.verdict}" for graph in self)

    def to_json(self) -> dict[str, Any]:
        """The object of one mask, or a list of several."""
        return self[0].to_json() if len(self) == 1 else {"kind": "graph", "masks": [graph.to_json() for graph in self]}


def _equal(graph: MaskGraph) -> str:
    if graph.equal_after is None:
        return "equal after finitely many layers"
    return f"equal after {'one layer' if graph.equal_after == 1 else f'{graph.equal_after:,} layers'}"


def _late(graph: MaskGraph) -> str:
    if graph.lambda_2 is None:
        return "the late factor was not found"
    gap = graph.spectral_gap if graph.spectral_gap is not None else 1 - graph.lambda_2
    factor = f"{graph.lambda_2:.6g}" if gap > 1e-5 else f"1 - {gap:.3g}"
    when = f"after the first {graph.transient:,} layers each" if graph.transient else "each layer"
    return f"{when} multiplies their differences by {factor}"


def count_words(value: float | None) -> str:
    """A count with thousands separators; a question mark if it is not known."""
    if value is None or not math.isfinite(value):
        return "?"
    return f"{int(value):,}" if value == int(value) else f"{value:.6g}"
