"""Which keys rows of attention may see, counted strip by strip: a mask is sliced, never combined into another one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankscope._errors import InputError
from rankscope.linalg.score_tiles import HIDES

_STRIP_ENTRIES = 1 << 22


class SupportRows:
    """Mask and causal order together.

    Args:
        shape: ``(batch, heads, query, key)``.
        device: where results lie.
        mask: broadcastable to ``shape``; True where a key is visible, or what is added to scores.
        is_causal: a row sees keys up to its own place.

    Raises:
        InputError: a mask that does not broadcast.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], device: torch.device, mask: Tensor | None, *, is_causal: bool
    ) -> None:
        self._shape, self._device, self.is_causal = shape, device, is_causal
        self._mask: Tensor | None = None
        if mask is not None:
            padded = (1,) * (4 - mask.ndim) + tuple(mask.shape)
            if len(padded) != 4 or any(m not in (1, s) for m, s in zip(padded, shape, strict=True)):
                raise InputError(
                    f"The attention mask has the shape {tuple(mask.shape)}. Expected one that broadcasts to {shape}."
                )
            # Batch and heads stay as they are: what all of them share is counted once.
            self._mask = mask.reshape(padded).expand(*padded[:2], *shape[2:])

    def mask_of(self, b: int, h: int) -> Tensor | None:
        """The mask of one matrix, ``(query, key)``."""
        return None if self._mask is None else self._mask.expand(self._shape)[b, h]

    @cached_property
    def size(self) -> Float[Tensor, "matrices query"]:
        """Number of keys each row may see."""
        if self._mask is None:
            every = torch.full((self._shape[2],), self._shape[3], dtype=torch.float64, device=self._device)
            if self.is_causal:
                every = torch.minimum(every, torch.arange(1.0, self._shape[2] + 1, dtype=torch.float64).to(every))
            return self._by_matrix(every.expand(1, 1, -1))
        return self._by_matrix(torch.cat([seen.sum(-1) for seen in self._strips()], -1).double())

    @cached_property
    def first_key(self) -> Int[Tensor, "batch heads"]:
        """The first key that any row may see: padding may stand on the left."""
        if self._mask is None:
            return torch.zeros(self._shape[:2], dtype=torch.int64, device=self._device)
        seen = torch.zeros(*self._mask.shape[:2], self._shape[3], dtype=torch.bool, device=self._device)
        for strip in self._strips():
            seen |= strip.any(-2)
        return seen.to(torch.uint8).argmax(-1).expand(self._shape[:2])

    @cached_property
    def sees_first(self) -> Bool[Tensor, "matrices query"]:
        """Whether a row may see the first key."""
        if self._mask is None:
            return torch.ones(self._shape[0] * self._shape[1], self._shape[2], dtype=torch.bool, device=self._device)
        first = self.first_key[: self._mask.shape[0], : self._mask.shape[1], None, None]
        column = self._mask.gather(-1, first.expand(-1, -1, self._shape[2], 1)).squeeze(-1)
        seen = _visible(column)
        if self.is_causal:
            seen &= torch.arange(self._shape[2], device=self._device) >= first.squeeze(-1)
        return self._by_matrix(seen)

    def _strips(self) -> Iterator[Bool[Tensor, "batch heads strip key"]]:
        assert self._mask is not None
        batch, heads, queries, keys = self._mask.shape
        height = max(1, _STRIP_ENTRIES // max(1, batch * heads * keys))
        for start in range(0, queries, height):
            seen = _visible(self._mask[:, :, start : start + height])
            if self.is_causal:
                place = torch.arange(start, start + seen.shape[2], device=self._device)
                seen = seen & (torch.arange(keys, device=self._device) <= place.unsqueeze(-1))
            yield seen

    def _by_matrix(self, value: Tensor) -> Tensor:
        return value.expand(*self._shape[:3]).flatten(0, 1)


def _visible(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > HIDES
