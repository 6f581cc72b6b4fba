"""Attention scores of a few heads, computed a few rows at a time from queries and keys, without the full matrix.

Heads whose matrices are small go together: on an accelerator a kernel on one of them takes as long to launch as one on
all. A head whose matrix does not fit the budget goes alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

HIDES = -5000.0
"""Models hide a key by adding -1e4, -1e9, the lowest float or -inf to its score. Adding anything below this threshold
gives probability zero in every float format, and no genuine score is this low."""

_CPU_ENTRIES, _DEVICE_ENTRIES = 1 << 18, 1 << 24
# A product of fewer rows with all keys takes longer per row, even if the strip no longer fits into the cache.
_LEAST_ROWS = 128


@dataclass(frozen=True)
class HeadScores:
    """Scores of a few heads: the same query rows of each with all keys.

    Attributes:
        query: query rows, times the scale.
        key: all keys.
        places: position of each row in its sequence, ascending.
        positions: the same numbers on the host, which plans the walk from them.
        causal: whether a row sees only keys up to its own position.
        mask: mask of all rows of the sequence and all keys, boolean or additive.
    """

    query: Float[Tensor, "heads rows dim"]
    key: Float[Tensor, "heads keys dim"]
    places: Int[Tensor, " rows"]
    positions: Sequence[int]
    causal: bool = False
    mask: Shaped[Tensor, "heads queries keys"] | None = None

    @classmethod
    def of(
        cls,
        query: Float[Tensor, "heads query dim"],
        key: Float[Tensor, "heads keys dim"],
        scale: float,
        positions: Sequence[int],
        *,
        causal: bool = False,
        mask: Shaped[Tensor, "heads query keys"] | None,
    ) -> HeadScores:
        """Select the rows ``positions`` from all queries; half-precision input is converted to float32."""
        places = _on_device(positions, query.device)
        dtype = torch.promote_types(query.dtype, torch.float32)
        rows = query if len(positions) == query.shape[1] else query[:, places]
        return cls(rows.to(dtype) * scale, key.to(dtype), places, positions, causal, mask)

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.query.shape[0]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.query.shape[1]

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.key.shape[1]

    def pick(self, numbers: Sequence[int]) -> HeadScores:
        """A few of the rows."""
        rows = _on_device(numbers, self.query.device)
        positions = [self.positions[number] for number in numbers]
        return replace(self, query=self.query[:, rows], places=self.places[rows], positions=positions)

    def strips(self) -> Iterator[slice]:
        """The rows, as many at a time as fit the budget."""
        height = max(_LEAST_ROWS, _entries(self.query.device) // max(1, self.heads * self.keys))
        for start in range(0, self.rows, height):
            yield slice(start, min(self.rows, start + height))

    def room(self) -> Tensor:
        """Memory for the largest strip: fresh memory for each would take longer than what is computed in it."""
        height = max((rows.stop - rows.start for rows in self.strips()), default=0)
        return self.query.new_empty(self.heads * height * self.keys)

    def strip(self, rows: slice, room: Tensor) -> Float[Tensor, "heads height seen"]:
        """The scores of some consecutive rows in ``room``, -inf where a key is hidden.

        Under a causal mask only with the keys up to the position of the last row.
        """
        first, last = self.positions[rows.start], self.positions[rows.stop - 1]
        seen = min(self.keys, last + 1) if self.causal else self.keys
        height = rows.stop - rows.start
        out = room[: self.heads * height * seen].view(self.heads, height, seen)
        torch.bmm(self.query[:, rows], self.key[:, :seen].mT, out=out)
        if self.mask is not None:
            # consecutive positions are a slice of the mask, which needs no copy
            together = last - first == height - 1
            mask = self.mask[:, first : last + 1] if together else self.mask[:, self.places[rows]]
            mask = mask[..., :seen]
            _ = out.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else out.add_(mask)
        if self.causal and first + 1 < seen:
            later = torch.arange(first + 1, seen, device=out.device) > self.places[rows, None]
            out[..., first + 1 :].masked_fill_(later, -torch.inf)
        return out


def _entries(device: torch.device) -> int:
    """Entries of a strip: on a CPU it stays in the caches."""
    return _CPU_ENTRIES * min(4, torch.get_num_threads()) if device.type == "cpu" else _DEVICE_ENTRIES


Part = tuple[slice, slice]
"""Sequences and heads that go together."""


def parts(query: Tensor, key: Tensor, positions: Sequence[Sequence[int]]) -> Iterator[Part]:
    """What goes together: as many sequences with the same rows, or heads of one sequence, as fill a strip.

    Args:
        query: ``(batch, heads, query, dim)``.
        key: ``(batch, key heads, key, dim)``.
        positions: the rows of each sequence.
    """
    batch, heads = query.shape[:2]
    most = max(1, _entries(query.device) // max(1, query.shape[2] * key.shape[2]))
    if most < heads:
        of_key = heads // key.shape[1]
        step = most // of_key * of_key or 1  # all heads that share a key, or one of them
        for b, h in itertools.product(range(batch), range(0, heads, step)):
            yield slice(b, b + 1), slice(h, min(heads, h + step))
        return
    start = 0
    for b in range(1, batch + 1):
        if b == batch or (b + 1 - start) * heads > most or positions[b] != positions[start]:
            yield slice(start, b), slice(0, heads)
            start = b


def keys_of(part: Part, key: Tensor, of_key: int) -> Float[Tensor, "heads keys dim"]:
    """The keys of the heads of a part, ``of_key`` of which share one."""
    sequences, heads = part
    chosen = key[sequences, heads.start // of_key : (heads.stop - 1) // of_key + 1]
    each = (heads.stop - heads.start) // max(1, chosen.shape[1])
    return chosen.unsqueeze(2).expand(-1, -1, each, -1, -1).flatten(0, 2)


def _on_device(numbers: Sequence[int], device: torch.device) -> Int[Tensor, " numbers"]:
    if isinstance(numbers, range):
        return torch.arange(numbers.start, numbers.stop, numbers.step, device=device)
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def largest_scores(scores: HeadScores) -> Float[Tensor, "heads rows"]:
    """The largest score of each row; -inf for a row that sees no key."""
    room = scores.room()
    found = [scores.strip(rows, room).amax(-1) for rows in scores.strips()]
    return torch.cat([scores.query.new_zeros(scores.heads, 0), *found], -1)
