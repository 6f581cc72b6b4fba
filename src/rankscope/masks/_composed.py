"""Masks made of masks: united, intersected, complemented."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankscope.masks._edges import EDGE_LIMIT, Bools, Rows, united
from rankscope.masks._mask import Mask


@dataclass(frozen=True, repr=False)
class Either(Mask):
    """What any of the parts lets see."""

    parts: tuple[Mask, ...]

    @property
    def is_causal(self) -> bool:
        """When every part is."""
        return all(part.is_causal for part in self.parts)

    @property
    def self_loops(self) -> bool:
        """When one part has them."""
        return any(part.self_loops for part in self.parts)

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Any part."""
        return reduce(torch.logical_or, (part.sees(query, key) for part in self.parts))

    def most_edges(self, tokens: int) -> int:
        """The sum over the parts, and no more than all pairs."""
        return min(tokens * tokens, sum(part.most_edges(tokens) for part in self.parts))

    def rows(self, tokens: int) -> Rows:
        """The parts' rows merged; every pair looked at when they are too many to hold side by side."""
        if sum(part.most_edges(tokens) for part in self.parts) > EDGE_LIMIT:
            return self._rows_by_scan(tokens)
        return united([part.rows(tokens) for part in self.parts], tokens)

    def among(self, rows: Rows, tokens: int) -> Bools:
        """Any part."""
        return reduce(np.bitwise_or, (part.among(rows, tokens) for part in self.parts))

    def describe(self) -> dict[str, Any]:
        """``{"any": [...]}``."""
        return {"any": [part.describe() for part in self.parts]}

    def __str__(self) -> str:
        return " | ".join(str(part) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Both(Mask):
    """What all of the parts let see."""

    parts: tuple[Mask, ...]

    @property
    def is_causal(self) -> bool:
        """When one part is."""
        return any(part.is_causal for part in self.parts)

    @property
    def self_loops(self) -> bool:
        """When every part has them."""
        return all(part.self_loops for part in self.parts)

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Every part."""
        return reduce(torch.logical_and, (part.sees(query, key) for part in self.parts))

    def most_edges(self, tokens: int) -> int:
        """Those of the narrowest part."""
        return min(part.most_edges(tokens) for part in self.parts)

    def rows(self, tokens: int) -> Rows:
        """The narrowest part's rows, sifted by the others: wide parts are never written out."""
        narrowest = min(self.parts, key=lambda part: part.most_edges(tokens))
        if narrowest.most_edges(tokens) > EDGE_LIMIT:
            return self._rows_by_scan(tokens)
        rows = narrowest.rows(tokens)
        for part in self.parts:
            if part is not narrowest:
                rows = rows.where(part.among(rows, tokens))
        return rows

    def among(self, rows: Rows, tokens: int) -> Bools:
        """Every part."""
        return reduce(np.bitwise_and, (part.among(rows, tokens) for part in self.parts))

    def describe(self) -> dict[str, Any]:
        """``{"all": [...]}``."""
        return {"all": [part.describe() for part in self.parts]}

    def __str__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Either) else str(part) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Complement(Mask):
    """What the part does not let see."""

    part: Mask

    @property
    def is_causal(self) -> bool:
        """Never promised."""
        return False

    @property
    def self_loops(self) -> bool:
        """Never promised."""
        return False

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Where the part does not."""
        return ~self.part.sees(query, key)

    def most_edges(self, tokens: int) -> int:
        """All pairs: a bound of the part from above says nothing here."""
        return tokens * tokens

    def rows(self, tokens: int) -> Rows:
        """Every pair looked at."""
        return self._rows_by_scan(tokens)

    def among(self, rows: Rows, tokens: int) -> Bools:
        """Edges that the part has not."""
        return ~self.part.among(rows, tokens)

    def describe(self) -> dict[str, Any]:
        """``{"not": ...}``."""
        return {"not": self.part.describe()}

    def __str__(self) -> str:
        return f"~({self.part})" if isinstance(self.part, (Either, Both)) else f"~{self.part}"


def either(*masks: Mask) -> Mask:
    """United; a union inside a union is one union, so that grouping leaves no trace."""
    parts = [part for mask in masks for part in (mask.parts if isinstance(mask, Either) else (mask,))]
    return parts[0] if len(parts) == 1 else Either(tuple(parts))


def both(*masks: Mask) -> Mask:
    """Intersected; an intersection inside an intersection is one."""
    parts = [part for mask in masks for part in (mask.parts if isinstance(mask, Both) else (mask,))]
    return parts[0] if len(parts) == 1 else Both(tuple(parts))


def complement(mask: Mask) -> Mask:
    """Complemented; twice is the mask itself."""
    return mask.part if isinstance(mask, Complement) else Complement(mask)
