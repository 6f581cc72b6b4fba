"""The declaration of a mask, the decorator that registers one, and a registered mask with its parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rankscope._citations import Cite
from rankscope._printing import brief
from rankscope._registry import Registry
from rankscope.errors import InputError, UnknownNameError
from rankscope.masks._edges import Bools, EdgeRows, Edges, contained
from rankscope.masks._mask import Mask

Value = int | str
LARGEST = (1 << 31) - 1


@dataclass(frozen=True)
class Parameter:
    """One parameter of a mask.

    Attributes:
        name: name in the predicate's signature.
        meaning: one line for the documentation and the command line.
        kind: ``int`` or ``str``.
        minimum: smallest value of an ``int``.
        maximum: largest value of an ``int``.
        default: default value; None if it is required.
    """

    name: str
    meaning: str
    kind: type[int] | type[str] = int
    minimum: int = 0
    maximum: int = LARGEST
    default: Value | None = None

    def __str__(self) -> str:
        return self.name if self.default is None else f"{self.name}={written(self.default)}"

    def check(self, value: object, mask: str) -> Value:
        """The value, if it is valid; raises otherwise."""
        if self.kind is str and isinstance(value, str):
            return value
        if self.kind is int and isinstance(value, int) and not isinstance(value, bool):
            if self.minimum <= value <= self.maximum:
                return value
            raise InputError(
                f"{mask}({self.name}={_short(value)}): {self.name} goes from {self.minimum} to {self.maximum}."
            )
        wanted = "a whole number" if self.kind is int else "a string"
        raise InputError(f"{mask}: {self.name} ({self.meaning}) is {wanted}, not {_short(value)}.")


@dataclass(frozen=True)
class MaskSpec:
    """A mask: one pure function, and the facts that surgery, tests, documentation and the command line use.

    Call it with the parameters, by position or by name, to get a :class:`Mask`.

    Attributes:
        name: the function's name.
        parameters: in the order of the signature.
        is_causal: no query sees a later key, for any parameters.
        self_loops: each query sees its own position, for any parameters.
        pointwise: the predicate works for any broadcastable positions; otherwise it must be given all keys.
        example: an expression with small parameters.
        cites: its sources.
        summary: first line of its docstring.
        predicate: takes a column of query positions, the row of all key positions, and the parameters by name; returns
            booleans that broadcast to both.
        edges: takes a number of tokens and the parameters by name; the keys of each query without a square matrix.
        settle: turns checked parameters into those that are stored, e.g. adds the digest of a file.

    Example:
        >>> from rankscope.masks import MASKS
        >>> MASKS["causal_window"](width=2) == MASKS["causal_window"](2)
        True
    """

    name: str
    parameters: tuple[Parameter, ...]
    is_causal: bool
    self_loops: bool
    pointwise: bool
    example: str
    cites: tuple[Cite, ...]
    summary: str
    predicate: Callable[..., Tensor]
    edges: Callable[..., Edges]
    settle: Callable[[dict[str, Value]], dict[str, Value]]

    __repr__ = brief

    @property
    def signature(self) -> str:
        """Name and parameters, as written in an expression."""
        return f"{self.name}({', '.join(str(p) for p in self.parameters)})" if self.parameters else self.name

    def __call__(self, *values: Value, **named: Value) -> Mask:
        """The mask with these parameters, each checked against its declaration."""
        if len(values) > len(self.parameters):
            raise InputError(f"{self.signature} takes {len(self.parameters)} parameters, got {len(values)}.")
        given = dict(zip((p.name for p in self.parameters), values, strict=False))
        for name, value in named.items():
            if name not in {p.name for p in self.parameters}:
                raise UnknownNameError(f"parameter of {self.signature}", name, (p.name for p in self.parameters))
            if name in given:
                raise InputError(f"{self.signature}: {name} is given twice.")
            given[name] = value
        missing = [p.name for p in self.parameters if p.name not in given and p.default is None]
        if missing:
            raise InputError(f"{self.signature} needs {' and '.join(missing)}, e.g. {self.example}.")
        checked = {p.name: p.check(given.get(p.name, p.default), self.name) for p in self.parameters}
        return NamedMask(self.name, tuple(self.settle(checked).items()))


MASKS: Registry[MaskSpec] = Registry("mask", __package__)


def mask(
    *,
    edges: Callable[..., Edges],
    example: str,
    is_causal: bool,
    self_loops: bool,
    parameters: tuple[Parameter, ...] = (),
    pointwise: bool = True,
    cites: tuple[Cite, ...] = (),
    settle: Callable[[dict[str, Value]], dict[str, Value]] = dict,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a predicate of query and key positions; the function itself is returned unchanged."""

    def register(predicate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name, summary = predicate.__name__, (predicate.__doc__ or "").strip().split("\n", 1)[0]
        facts = (parameters, is_causal, self_loops, pointwise, example, cites, summary)
        MASKS.add(name, MaskSpec(name, *facts, predicate, edges, settle))
        return predicate

    return register


@dataclass(frozen=True, repr=False)
class NamedMask(Mask):
    """A registered mask with its parameters, created by calling its :class:`MaskSpec`."""

    name: str
    parameters: tuple[tuple[str, Value], ...]

    @property
    def spec(self) -> MaskSpec:
        """The declaration."""
        return MASKS[self.name]

    @property
    def is_causal(self) -> bool:
        """As declared."""
        return self.spec.is_causal

    @property
    def self_loops(self) -> bool:
        """As declared."""
        return self.spec.self_loops

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """The declared predicate."""
        seen = self.spec.predicate(query, key, **dict(self.parameters))
        return seen.expand(np.broadcast_shapes(query.shape, key.shape))

    def edges(self, tokens: int) -> Edges:
        """The declared keys of each query, as ranges or lists."""
        return self.spec.edges(tokens, **dict(self.parameters))

    def most_edges(self, tokens: int) -> int:
        """The declared number."""
        return self.edges(tokens).count

    def rows(self, tokens: int) -> EdgeRows:
        """The declared edges, listed."""
        return self.edges(tokens).rows()

    def among(self, rows: EdgeRows, tokens: int) -> Bools:
        """Uses the predicate on each pair, or looks the pair up if the predicate needs all keys."""
        if not self.spec.pointwise:
            return contained(rows, self.rows(tokens), tokens)
        seen: Bools = self.sees(torch.from_numpy(rows.queries), torch.from_numpy(rows.indices)).numpy()
        return seen

    def __str__(self) -> str:
        if len(self.parameters) < 2:
            return self.name + "".join(f"({written(value)})" for _, value in self.parameters)
        return f"{self.name}({', '.join(f'{name}={written(value)}' for name, value in self.parameters)})"


def written(value: Value) -> str:
    """A value as written in an expression: digits, or a string in JSON quotes."""
    return json.dumps(value, ensure_ascii=False)


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
