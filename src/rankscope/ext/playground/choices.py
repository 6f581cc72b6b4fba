"""The choices of the playground and their limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rankscope.errors import InputError
from rankscope.models.design import Design, NormKind, NormPlace
from rankscope.remedies import REMEDIES

NO_REMEDY = "none"
MOST_SEED = 2**31 - 1
MOST_SCORES = 3_200_000
"""Most attention scores of one run (blocks x heads x tokens x tokens): determines the time of an answer."""
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
    """Configuration of the playground's transformer, validated on construction.

    Attributes:
        depth: number of blocks.
        tokens: number of tokens of the single sequence.
        width: width of the residual stream.
        heads: attention heads; the width must be divisible by it.
        skip_gain: factor on each skip; 0 removes the skips.
        mlp: activation of the MLP; ``"none"`` for blocks of attention alone.
        norm: kind of norm.
        norm_place: before a branch or after its sum; no effect without a norm.
        mask: attention mask.
        positions: how positions enter the scores or the first tokens.
        weight_scale: standard deviation of every weight, times the square root of its fan-in.
        seed: seed of the weights and the first tokens.
        remedy: a name from ``rankscope ls remedies``, or ``"none"``.

    Raises:
        InputError: an invalid value, or a network too large to compute interactively.

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
        """The same configuration as a design; the model draws its initialisation from it."""
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
        """The Python expression that recreates these choices.

        Example:
            >>> Choices(depth=2, norm="none").call()
            "Choices(depth=2, norm='none')"
        """
        usual = {field.name: field.default for field in fields(self)}
        changed = ", ".join(f"{name}={value!r}" for name, value in asdict(self).items() if value != usual[name])
        return f"Choices({changed})"


def choices_from(words: Sequence[str]) -> Choices:
    """Parse ``name=value`` words into choices; the others keep their defaults.

    Raises:
        InputError: a word is not a pair, a name is unknown, or a value is invalid.

    Example:
        >>> choices_from(["skip_gain=0", "mlp=none"]).call()
        "Choices(skip_gain=0.0, mlp='none')"
    """
    known = tuple(field.name for field in fields(Choices))
    chosen: dict[str, Any] = {}
    for word in words:
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or name not in known:
            raise InputError(f"{_short(word)} is not a choice. Expected NAME=VALUE with one of {', '.join(known)}.")
        chosen[name] = _read(value) if name in RANGES or name in WHOLE else value
    return Choices(**chosen)


def _read(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _number(name: str, value: Any) -> float:
    """Check that a value is a number within its range; integers stay integers."""
    low, high = RANGES.get(name, (1, 1 << 10))
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high or (name in WHOLE and value != int(value)):
        kind = "a whole number" if name in WHOLE else "a number"
        raise InputError(f"{name} is {_short(value)}. Expected {kind} from {low:g} to {high:g}.")
    return int(value) if name in WHOLE else float(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
