"""What a visitor of the playground may choose, and how much of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rankscope.errors import InputError
from rankscope.remedies import REMEDIES
from rankscope.theory.designs.design import Design, NormKind, NormPlace

NO_REMEDY = "none"
MOST_SEED = 2**31 - 1
MOST_SCORES = 3_200_000
"""Most attention scores of one run (blocks x heads x tokens x tokens): what the time of an answer goes by."""
RANGES: Mapping[str, tuple[float, float]] = {
    "depth": (1, 48),
    "tokens": (2, 128),
    "skip_gain": (-1.0, 2.0),
    "weight_scale": (0.1, 3.0),
    "seed": (0, MOST_SEED),
}
"""Smallest and largest value of each number."""
OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "width": (16, 32, 64, 96, 128),
    "heads": (1, 2, 4, 8, 16),
    "mlp": ("none", "gelu", "relu", "swiglu"),
    "norm": ("layernorm", "rmsnorm", "none"),
    "norm_place": ("pre", "post"),
    "mask": ("complete", "causal", "window(4)", "causal_window(4)", "causal_window(4) | sink(1)"),
    "positions": ("none", "learned", "rope", "alibi"),
}
"""What can be picked from a list."""
WHOLE = ("depth", "tokens", "width", "heads", "seed")


@dataclass(frozen=True)
class Choices:
    """A transformer to play with. Checked when it is made, whoever makes it.

    Attributes:
        depth: blocks.
        tokens: tokens of the one sequence.
        width: of the stream.
        heads: attention heads; they share the width evenly.
        skip_gain: what each skip adds of the stream; 0 cuts the skips.
        mlp: activation of the MLP; ``"none"`` for blocks of attention alone.
        norm: kind of norm.
        norm_place: before a branch or after its sum; of no effect without a norm.
        mask: who may see whom.
        positions: how scores or first tokens know places.
        weight_scale: standard deviation of every weight, times the square root of how many inputs it sums over.
        seed: of weights and first tokens.
        remedy: a name from ``rankscope ls remedies``, or ``"none"``.

    Raises:
        InputError: a value that is not one of these, or a network too large to be answered at once.

    Example:
        >>> Choices(depth=2, skip_gain=0.0).design().attention_skip
        0.0
    """

    depth: int = 24
    tokens: int = 64
    width: int = 64
    heads: int = 4
    skip_gain: float = 1.0
    mlp: str = "gelu"
    norm: str = "layernorm"
    norm_place: str = "post"
    mask: str = "complete"
    positions: str = "none"
    weight_scale: float = 1.0
    seed: int = 0
    remedy: str = NO_REMEDY

    def __post_init__(self) -> None:
        for name in (*RANGES, "width", "heads"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        for name, known in OPTIONS.items():
            value = getattr(self, name)
            if not isinstance(value, (str, int)) or value not in known:
                raise InputError(f"{name} is {_short(value)}. Expected one of {', '.join(map(str, known))}.")
        if self.remedy != NO_REMEDY and (not isinstance(self.remedy, str) or self.remedy not in REMEDIES):
            raise InputError(f"remedy is {_short(self.remedy)}. Expected {NO_REMEDY} or one of {', '.join(REMEDIES)}.")
        if self.width % self.heads:
            raise InputError(f"{self.heads} heads cannot share a width of {self.width} evenly.")
        if self.positions == "rope" and self.width // self.heads % 2:
            raise InputError(f"Rotary positions turn pairs: {self.width} / {self.heads} channels per head is odd.")
        scores = self.depth * self.heads * self.tokens**2
        if scores > MOST_SCORES:
            raise InputError(
                f"{self.depth} blocks with {self.heads} heads on {self.tokens} tokens have {scores:,} attention "
                f"scores; the playground stops at {MOST_SCORES:,}. Take fewer tokens, heads or blocks."
            )

    def design(self) -> Design:
        """The same as a design, whose initialisation the model draws."""
        std = self.weight_scale / math.sqrt(self.width)
        bare = self.norm == "none"
        norm: NormKind = self.norm  # type: ignore[assignment]
        place: NormPlace = "none" if bare else self.norm_place  # type: ignore[assignment]
        return Design(
            depth=self.depth,
            width=self.width,
            heads=self.heads,
            tokens=self.tokens,
            mask=self.mask,
            positions=self.positions,  # type: ignore[arg-type]
            norm=norm,
            norm_place=place,
            mlp=self.mlp,  # type: ignore[arg-type]
            attention_skip=self.skip_gain,
            mlp_skip=self.skip_gain,
            query_std=std,
            key_std=std,
            value_std=std,
            output_std=std,
            mlp_in_std=std,
            mlp_out_std=std / 2,
            embedding_norm=False,
        )

    def call(self) -> str:
        """The line of Python that makes these choices again.

        Example:
            >>> Choices(depth=2, norm="none").call()
            "Choices(depth=2, norm='none')"
        """
        usual = {field.name: field.default for field in fields(self)}
        changed = ", ".join(f"{name}={value!r}" for name, value in asdict(self).items() if value != usual[name])
        return f"Choices({changed})"


def choices_from(words: Sequence[str]) -> Choices:
    """Choices from ``name=value`` words, the others as they are by default.

    Raises:
        InputError: a word that is no pair, a name that is no choice, or a value it cannot have.

    Example:
        >>> choices_from(["skip_gain=0", "mlp=none"]).call()
        "Choices(skip_gain=0.0, mlp='none')"
    """
    known = tuple(field.name for field in fields(Choices))
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or name not in known:
            raise InputError(f"{_short(word)} is no choice. Expected NAME=VALUE with one of {', '.join(known)}.")
        found[name] = _read(value) if name in RANGES or name in WHOLE else value
    return Choices(**found)


def _read(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _number(name: str, value: Any) -> float:
    """A plain number within its range; whole ones as such."""
    low, high = RANGES.get(name, (1, 1 << 10))
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high or (name in WHOLE and value != int(value)):
        kind = "a whole number" if name in WHOLE else "a number"
        raise InputError(f"{name} is {_short(value)}. Expected {kind} from {low:g} to {high:g}.")
    return int(value) if name in WHOLE else float(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
