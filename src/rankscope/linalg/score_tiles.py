"""Attention scores of a few heads, computed one tile at a time from queries and keys, without forming the full matrix.

Heads whose matrices are small go together: on an accelerator a kernel on one of them takes as long to launch as one on
all. A head whose matrix does not fit the budget for a tile goes alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int, Shaped
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
    """Consecutive rows, the same of every head.

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
    query: Float[Tensor, "heads height dim"]
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
    """Scores of a few heads: the same query rows of each with all keys, tile by tile.

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

    query: Float[Tensor, "heads rows dim"]
    key: Float[Tensor, "heads padded dim"]
    keys: int
    places: Int[Tensor, " rows"]
    positions: Sequence[int]
    width: int
    causal: bool = False
    mask: Shaped[Tensor, "heads query keys"] | None = None
    shift: Float[Tensor, "heads rows"] | None = None
    later: Float[Tensor, "heads rows"] | None = None

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
        keys = key.shape[1]
        width = _width(len(positions), keys, query.device)
        rows = query if len(positions) == query.shape[1] else query[:, places]
        padded = torch.nn.functional.pad(key.to(dtype), (0, 0, 0, -keys % width))
        return cls(rows.to(dtype) * scale, padded, keys, places, positions, width, causal, mask)

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.query.shape[0]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.query.shape[1]

    @property
    def tiles(self) -> int:
        """Number of tiles in a row."""
        return self.key.shape[1] // self.width

    def less(self, shift: Float[Tensor, "heads rows"], later: Float[Tensor, "heads rows"] | None = None) -> HeadScores:
        """The same scores minus one or two numbers per row: logarithms of probabilities.

        The first is subtracted within the product of queries and keys, which is free:
        ``[q, -shift] . [k, 1] = q.k - shift``.
        """
        ones = torch.ones_like(self.key[..., :1])
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
        shift, later = (None if taken is None else taken[:, rows] for taken in (self.shift, self.later))
        positions = [self.positions[number] for number in numbers]
        return replace(
            self, query=self.query[:, rows], places=self.places[rows], positions=positions, shift=shift, later=later
        )

    def only(self, numbers: Int[Tensor, " some"]) -> HeadScores:
        """A few of the heads."""
        mask, shift, later = (None if part is None else part[numbers] for part in (self.mask, self.shift, self.later))
        return replace(self, query=self.query[numbers], key=self.key[numbers], mask=mask, shift=shift, later=later)

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
            return Strip(rows, self.query[:, rows], first, last, tiles, reach=math.inf, taken=math.inf)
        taken = sum(float(off[:, rows].amax()) for off in (self.shift, self.later) if off is not None)
        return Strip(rows, self.query[:, rows], first, last, tiles, float(self._query_lengths[:, rows].amax()), taken)

    def height(self, *, held: bool = False) -> int:
        """Rows in a strip: a tile fits into the cache, and a strip that is held takes a few dozen megabytes."""
        most = _tile_entries(self.query.device) // (self.heads * self.width)
        if held:
            most = min(most, _HELD_ENTRIES // max(1, self.heads * self.key.shape[1]))
        return max(1, min(self.rows, most))

    def put_log(self, out: Float[Tensor, "heads height width"], strip: Strip, tile: int) -> Tensor:
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
        return [tile.mT for tile in self.key.reshape(self.heads, self.tiles, self.width, -1).unbind(1)]

    @cached_property
    def _key_lengths(self) -> list[float]:
        lengths = self._lengths(self.key).reshape(self.heads, self.tiles, self.width)
        return [float(length) for length in lengths.amax((0, -1)).tolist()]

    @cached_property
    def _query_lengths(self) -> Tensor:
        return self._lengths(self.query)

    def _lengths(self, rows: Float[Tensor, "heads rows dim"]) -> Float[Tensor, "heads rows"]:
        """Lengths without the shift column: the shift is known, and a product of lengths would bound it poorly."""
        lengths: Tensor = torch.linalg.vector_norm(rows if self.shift is None else rows[..., :-1], dim=-1)
        return lengths

    def put(self, out: Float[Tensor, "heads height width"], strip: Strip, tile: int) -> Tensor:
        """Write one tile to ``out``, -inf where a key is hidden."""
        start, stop = tile * self.width, (tile + 1) * self.width
        torch.bmm(strip.query, self._key_tiles[tile], out=out)
        if self.mask is not None:
            self._mask_(out[..., : self.keys - start], strip, slice(start, min(stop, self.keys)))
        if self.later is not None:
            out.sub_(self.later[:, strip.rows, None])
        # Only tiles that reach past the strip's first row contain hidden keys.
        if self.causal and strip.first < stop - 1:
            from_here = max(start, strip.first + 1)
            place = torch.arange(from_here, stop, device=out.device)
            out[..., from_here - start :].masked_fill_(place > self.places[strip.rows, None], -torch.inf)
        if stop > self.keys:
            out[..., self.keys - start :] = -torch.inf
        return out

    def _mask_(self, out: Tensor, strip: Strip, columns: slice) -> None:
        assert self.mask is not None
        # Consecutive positions are a slice of the mask, which needs no copy.
        whole = strip.last - strip.first == strip.height - 1
        rows = self.mask[:, strip.first : strip.last + 1] if whole else self.mask[:, self.places[strip.rows]]
        tile = rows[..., columns]
        if tile.dtype == torch.bool:
            out.masked_fill_(~tile, -torch.inf)
        else:
            out.add_(tile)


def _tile_entries(device: torch.device) -> int:
    """Entries of a tile: on a CPU it stays in the cache."""
    return _CPU_ENTRIES * min(4, torch.get_num_threads()) if device.type == "cpu" else _DEVICE_ENTRIES


def _width(rows: int, keys: int, device: torch.device) -> int:
    """Keys per tile. An accelerator takes all rows at once, and as many keys as fit: few large kernels."""
    widest = 0 if device.type == "cpu" else _tile_entries(device) // max(1, rows)
    return min(max(1, keys), max(_TILE_KEYS, widest))


Part = tuple[slice, slice]
"""Sequences and heads that go together."""


def parts(query: Tensor, key: Tensor, positions: Sequence[Sequence[int]]) -> Iterator[Part]:
    """What goes together: as many sequences with the same rows, or heads of one sequence, as fill a tile.

    Args:
        query: ``(batch, heads, query, dim)``.
        key: ``(batch, key heads, key, dim)``.
        positions: the rows of each sequence.
    """
    batch, heads = query.shape[:2]
    most = max(1, _tile_entries(query.device) // max(1, query.shape[2] * key.shape[2]))
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
    found = [scores.query.new_zeros(scores.heads, 0)]
    for strip in scores.strips():
        S = scores.query.new_empty(scores.heads, strip.height, scores.width)
        largest = S.new_full((scores.heads, strip.height), -torch.inf)
        for tile in range(strip.tiles):
            largest = torch.maximum(largest, scores.put(S, strip, tile).amax(-1))
        found.append(largest)
    return torch.cat(found, -1)


def row_log_sums(scores: HeadScores) -> tuple[Float[Tensor, "heads rows"], Float[Tensor, "heads rows"]]:
    """The largest score of each row, and the log-sum-exp of the row minus that, by online softmax.

    Both are 0 for a row that sees no key.
    """
    found = [_log_sums_of_strip(scores, strip) for strip in scores.strips()]
    if not found:
        return scores.query.new_zeros(scores.heads, 0), scores.query.new_zeros(scores.heads, 0)
    largest, rest = zip(*found, strict=True)
    return torch.cat(largest, -1), torch.cat(rest, -1)


def _log_sums_of_strip(scores: HeadScores, strip: Strip) -> tuple[Tensor, Tensor]:
    S = scores.query.new_empty(scores.heads, strip.height, scores.width)
    largest = S.new_full((scores.heads, strip.height, 1), -torch.inf)
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
