"""Attention scores of one head, computed one tile at a time from queries and keys, without forming the full matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

HIDES = -5000.0
"""Models hide a key by adding -1e4, -1e9, the lowest float or -inf to its score. Adding anything below this threshold
gives probability zero in every float format, and no genuine score is this low."""

LEAST = -80.0
"""Logarithms of probabilities are clamped here. One e^-80 = 2e-35 per key adds up to less than the last digit of any
result, and exponentials that underflow take a hundred times as long."""

_TILE_KEYS = 512
_CPU_ENTRIES, _DEVICE_ENTRIES = 3 << 16, 1 << 24
_HELD_ENTRIES = 1 << 24


@dataclass(frozen=True)
class Strip:
    """Consecutive rows of a head.

    Attributes:
        rows: the slice of rows.
        query: their queries.
        first: position of the first row in the sequence.
        last: position of the last row.
        tiles: how many tiles, from the first, contain all keys that any of the rows sees.
        reach: length of the longest query; times the length of a key, it bounds the absolute value of a score.
        taken: the most that is subtracted from a score.
    """

    rows: slice
    query: Float[Tensor, "height dim"]
    first: int
    last: int
    tiles: int
    reach: float
    taken: float

    @property
    def height(self) -> int:
        """Number of rows."""
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True)
class HeadScores:
    """Scores of one head: some query rows with all keys, tile by tile.

    Attributes:
        query: query rows, times the scale.
        key: all keys, padded with zeros to fill the last tile.
        keys: number of keys without padding.
        places: position of each row in its sequence, ascending.
        positions: the same numbers on the host, which plans the walk from them.
        width: keys per tile.
        causal: whether a row sees only keys up to its own position.
        mask: mask of all rows of the sequence and all keys, boolean or additive.
        shift: subtracted from each row within the product: queries and keys have an extra column for it.
        later: subtracted from each row after the mask, for rows in which the mask would round the shift away.
    """

    query: Float[Tensor, "rows dim"]
    key: Float[Tensor, "padded dim"]
    keys: int
    places: Int[Tensor, " rows"]
    positions: Sequence[int]
    width: int
    causal: bool = False
    mask: Tensor | None = None
    shift: Float[Tensor, " rows"] | None = None
    later: Float[Tensor, " rows"] | None = None

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        scale: float,
        positions: Sequence[int],
        *,
        causal: bool = False,
        mask: Tensor | None,
    ) -> HeadScores:
        """Select the rows ``positions`` from all queries of a head; half-precision input is converted to float32."""
        places = _on_device(positions, query.device)
        dtype = torch.promote_types(query.dtype, torch.float32)
        keys = key.shape[0]
        width = min(_TILE_KEYS, max(1, keys))
        rows = query if len(positions) == query.shape[0] else query[places]
        padded = torch.nn.functional.pad(key.to(dtype), (0, 0, 0, -keys % width))
        return cls(rows.to(dtype) * scale, padded, keys, places, positions, width, causal, mask)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.query.shape[0]

    @property
    def tiles(self) -> int:
        """Number of tiles in a row."""
        return self.key.shape[0] // self.width

    def less(self, shift: Float[Tensor, " rows"], later: Float[Tensor, " rows"] | None = None) -> HeadScores:
        """The same scores minus one or two numbers per row: logarithms of probabilities.

        The first is subtracted within the product of queries and keys, which is free:
        ``[q, -shift] . [k, 1] = q.k - shift``.
        """
        ones = torch.ones_like(self.key[:, :1])
        return replace(
            self,
            query=torch.cat([self.query, -shift.to(self.query).unsqueeze(-1)], -1),
            key=torch.cat([self.key, ones], -1),
            shift=shift,
            later=later,
        )

    def pick(self, numbers: Sequence[int]) -> HeadScores:
        """A few of the rows."""
        rows = _on_device(numbers, self.query.device)
        shift, later = (None if taken is None else taken[rows] for taken in (self.shift, self.later))
        positions = [self.positions[number] for number in numbers]
        return replace(
            self, query=self.query[rows], places=self.places[rows], positions=positions, shift=shift, later=later
        )

    def strips(self, *, held: bool = False) -> Iterator[Strip]:
        """The rows, a few at a time; with ``held``, few enough that all tiles of a strip fit in memory."""
        height = self.height(held=held)
        for start in range(0, self.rows, height):
            yield self.strip(slice(start, min(self.rows, start + height)))

    def strip(self, rows: slice) -> Strip:
        """Some consecutive rows."""
        first, last = self.positions[rows.start], self.positions[rows.stop - 1]
        # Under a causal mask the last row of the strip sees the most keys; later tiles are hidden from all its rows.
        tiles = min(self.tiles, last // self.width + 1) if self.causal else self.tiles
        if self.query.device.type != "cpu":  # the bounds would have to come from the device
            return Strip(rows, self.query[rows], first, last, tiles, reach=math.inf, taken=math.inf)
        taken = sum(float(off[rows].amax()) for off in (self.shift, self.later) if off is not None)
        return Strip(rows, self.query[rows], first, last, tiles, float(self._query_lengths[rows].amax()), taken)

    def height(self, *, held: bool = False) -> int:
        """Rows in a strip: a tile fits into the cache, and a strip that is held takes a few dozen megabytes."""
        per_thread = _CPU_ENTRIES * min(4, torch.get_num_threads())
        entries = per_thread if self.query.device.type == "cpu" else _DEVICE_ENTRIES
        most = entries // self.width
        if held:
            most = min(most, _HELD_ENTRIES // max(1, self.key.shape[0]))
        return max(1, min(self.rows, most))

    def put_log(self, out: Float[Tensor, "height width"], strip: Strip, tile: int) -> Tensor:
        """Write one tile of logarithms to ``out``, none of them below :data:`LEAST`."""
        self.put(out, strip, tile)
        # Skip the clamp if nothing is hidden in this tile and the Cauchy-Schwarz bound on scores rules it out.
        touched = self.mask is not None or (self.causal and strip.first < (tile + 1) * self.width - 1)
        if touched or (tile + 1) * self.width > self.keys or not self._lowest(strip, tile) >= LEAST:
            out.clamp_min_(LEAST)
        return out

    def _lowest(self, strip: Strip, tile: int) -> float:
        if strip.reach == math.inf:
            return -math.inf
        return -strip.reach * self._key_lengths[tile] - strip.taken

    @cached_property
    def _key_tiles(self) -> list[Tensor]:
        return [tile.T for tile in self.key.view(self.tiles, self.width, -1)]

    @cached_property
    def _key_lengths(self) -> list[float]:
        lengths = self._lengths(self.key).view(self.tiles, self.width)
        return [float(length) for length in lengths.amax(-1).tolist()]

    @cached_property
    def _query_lengths(self) -> Tensor:
        return self._lengths(self.query)

    def _lengths(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, " rows"]:
        """Lengths without the shift column: the shift is known, and a product of lengths would bound it poorly."""
        lengths: Tensor = torch.linalg.vector_norm(rows if self.shift is None else rows[:, :-1], dim=-1)
        return lengths

    def put(self, out: Float[Tensor, "height width"], strip: Strip, tile: int) -> Tensor:
        """Write one tile to ``out``, -inf where a key is hidden."""
        start, stop = tile * self.width, (tile + 1) * self.width
        torch.mm(strip.query, self._key_tiles[tile], out=out)
        if self.mask is not None:
            self._mask_(out[:, : self.keys - start], strip, slice(start, min(stop, self.keys)))
        if self.later is not None:
            out.sub_(self.later[strip.rows, None])
        # Only tiles that reach past the strip's first row contain hidden keys.
        if self.causal and strip.first < stop - 1:
            from_here = max(start, strip.first + 1)
            place = torch.arange(from_here, stop, device=out.device)
            out[:, from_here - start :].masked_fill_(place > self.places[strip.rows, None], -torch.inf)
        if stop > self.keys:
            out[:, self.keys - start :] = -torch.inf
        return out

    def _mask_(self, out: Tensor, strip: Strip, columns: slice) -> None:
        assert self.mask is not None
        # Consecutive positions are a slice of the mask, which needs no copy.
        whole = strip.last - strip.first == strip.height - 1
        rows = self.mask[strip.first : strip.last + 1] if whole else self.mask[self.places[strip.rows]]
        tile = rows[:, columns]
        if tile.dtype == torch.bool:
            out.masked_fill_(~tile, -torch.inf)
        else:
            out.add_(tile)


def _on_device(numbers: Sequence[int], device: torch.device) -> Int[Tensor, " numbers"]:
    if isinstance(numbers, range):
        return torch.arange(numbers.start, numbers.stop, numbers.step, device=device)
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def largest_scores(scores: HeadScores) -> Float[Tensor, " rows"]:
    """The largest score of each row; -inf for a row that sees no key."""
    found = [scores.query.new_zeros(0)]
    for strip in scores.strips():
        S = scores.query.new_empty(strip.height, scores.width)
        largest = S.new_full((strip.height,), -torch.inf)
        for tile in range(strip.tiles):
            largest = torch.maximum(largest, scores.put(S, strip, tile).amax(-1))
        found.append(largest)
    return torch.cat(found)


def row_log_sums(scores: HeadScores) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """The largest score of each row, and the log-sum-exp of the row minus that, by online softmax.

    Both are 0 for a row that sees no key.
    """
    found = [_log_sums_of_strip(scores, strip) for strip in scores.strips()]
    if not found:
        return scores.query.new_zeros(0), scores.query.new_zeros(0)
    largest, rest = zip(*found, strict=True)
    return torch.cat(largest), torch.cat(rest)


def _log_sums_of_strip(scores: HeadScores, strip: Strip) -> tuple[Tensor, Tensor]:
    S = scores.query.new_empty(strip.height, scores.width)
    largest = S.new_full((strip.height, 1), -torch.inf)
    total = torch.zeros_like(largest)
    for tile in range(strip.tiles):
        scores.put(S, strip, tile)
        higher = torch.maximum(largest, S.amax(-1, keepdim=True))
        # A row that has seen no key yet has the maximum -inf; subtracting it would give NaN.
        base = higher.masked_fill(higher == -torch.inf, 0.0)
        now = S.sub_(base).clamp_min_(LEAST).exp_().sum(-1, keepdim=True)
        total, largest = total * (largest - base).exp_() + now, higher
    sees_nothing = largest == -torch.inf
    rest = total.log().masked_fill_(sees_nothing, 0.0)
    return largest.masked_fill_(sees_nothing, 0.0).squeeze(-1), rest.squeeze(-1)
