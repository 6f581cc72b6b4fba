r"""Attention on long sequences: the reductions of every attention metric, without a query by key matrix.

One walk over the tiles yields all sums and a product with the matrix. Everything is computed
for :math:`D = P - 1r^T` with a reference row r near the mean row: CP = CD, and sums of squares of D
do not cancel when rows are nearly equal, as those of P would. The exponentials are :math:`\tilde P = \mathrm{diag}(m)P`
with masses m that differ from 1 by the rounding of each row's log-sum. The small results are corrected for that:

.. math:: D = \mathrm{diag}(1/m)\tilde D - e r^T, \qquad \tilde D = \tilde P - 1r^T, \quad e = 1 - 1/m .

A walk starts with a row near the mean row, and with directions near the top singular vectors. Both come from a sample
of rows, each weighted by the number of rows it represents. Half of them are evenly spaced; the other half are denser
towards the beginning, where rows of a causal mask are short, large and different from each other. A poor sample costs
more steps or a wider interval, but never correctness.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankscope.errors import InputError
from rankscope.linalg.attention_view import AttentionSums, AttentionView
from rankscope.linalg.largest_singular_value import SingularValue, largest_singular_values, singular_value_within
from rankscope.linalg.precision import float64_home, is_wide, may_hold
from rankscope.linalg.score_tiles import HIDES, HeadScores, Part, Strip, keys_of, parts, row_log_sums

_STRIP_ENTRIES = 1 << 22


class SupportRows:
    """Mask and causal order together.

    Args:
        shape: ``(batch, heads, query, key)``.
        device: device of the results.
        mask: broadcastable to ``shape``; True where a key is visible, or an additive mask.
        is_causal: a row sees keys up to its own position.

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
            # Batch and head axes are not expanded: a mask that they share is counted once.
            self._mask = mask.reshape(padded).expand(*padded[:2], *shape[2:])

    @property
    def may_hide_by_adding(self) -> bool:
        """Whether keys may be hidden by adding a large negative number."""
        return self._mask is not None and self._mask.dtype != torch.bool

    def mask_of(self, part: Part) -> Tensor | None:
        """The mask of a few matrices, ``(matrices, query, key)``; of a single one it is a view."""
        return None if self._mask is None else self._mask.expand(self._shape)[part].flatten(0, 1)

    @cached_property
    def size(self) -> Float[Tensor, "matrices query"]:
        """Number of keys each row may see."""
        if self._mask is None:
            every = torch.full((self._shape[2],), self._shape[3], dtype=torch.float64, device=self._device)
            if self.is_causal:
                place = torch.arange(1.0, self._shape[2] + 1, dtype=torch.float64, device=self._device)
                every = torch.minimum(every, place)
            return self._by_matrix(every.expand(1, 1, -1))
        return self._by_matrix(torch.cat([seen.sum(-1) for seen in self._strips()], -1).double())

    @cached_property
    def first_key(self) -> Int[Tensor, "batch heads"]:
        """The first key that any row may see, which is not key 0 if padding is on the left."""
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

    @cached_property
    def sees_itself(self) -> Bool[Tensor, "matrices query"]:
        """Whether a row may see the key at its own position."""
        queries, keys = self._shape[2:]
        seen = torch.full((1, 1, queries), queries == keys, dtype=torch.bool, device=self._device)
        if self._mask is not None and queries == keys:
            seen = _visible(self._mask.diagonal(dim1=-2, dim2=-1))
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


BLOCK = 6
"""Number of directions multiplied in one walk: a product with so few costs less than the exponentials."""

_ROWS_FOR_MEAN = 32
_ROWS_FOR_DIRECTIONS = 256
_SEED = 0
_NEAR_EQUAL = 0.3
"""Relative deviation of the rows above which sums of squares are accurate enough without a reference row."""


def attention_start(
    logs: HeadScores, *, directions: bool
) -> tuple[Float[Tensor, "heads keys"], Float[Tensor, "heads keys block"]]:
    """A reference row, and orthonormal starting directions (no columns if not requested), of each head.

    The directions are the top right singular vectors of the sampled rows, centred, and one random direction, so that
    no singular vector is orthogonal to all of them.

    Args:
        logs: logarithms of probabilities.
        directions: whether to compute directions.
    """
    if logs.rows == 0:
        zero = torch.zeros(logs.heads, logs.keys, dtype=torch.float64, device=logs.query.device)
        return zero, zero.new_zeros(logs.heads, logs.keys, 0)
    numbers, weights = _some_rows(logs.rows, _ROWS_FOR_DIRECTIONS if directions else _ROWS_FOR_MEAN)
    weights = weights.to(logs.query.device, non_blocking=True)
    P = _probabilities(logs, numbers)
    mean = ((weights / weights.sum()).to(P) @ P).double()
    energy = _weighted_squares(P, weights)
    D = P.sub_(mean.to(P).unsqueeze(-2))
    is_near_equal = _weighted_squares(D, weights) <= _NEAR_EQUAL**2 * energy
    reference = mean.masked_fill(~is_near_equal.unsqueeze(-1), 0.0)
    if not directions:
        return reference, reference.new_zeros(logs.heads, logs.keys, 0)
    return reference, _directions(D.mul_(weights.sqrt().to(D).unsqueeze(-1)), min(BLOCK, logs.keys))


def _weighted_squares(
    rows: Float[Tensor, "heads some keys"], weights: Float[Tensor, " some"]
) -> Float[Tensor, " heads"]:
    squares: Tensor = torch.linalg.vector_norm(rows, dim=-1).double().square()
    return squares @ weights


def _some_rows(rows: int, most: int) -> tuple[Sequence[int], Float[Tensor, " some"]]:
    """Numbers of sampled rows, and how many rows each one represents."""
    if rows <= most:
        return range(rows), torch.ones(rows, dtype=torch.float64)
    even = torch.linspace(0, rows - 1, most // 2, dtype=torch.float64)
    dense = torch.logspace(0, math.log10(rows), most - most // 2, dtype=torch.float64) - 1
    spread = torch.cat([even, dense]).round().long().clamp(0, rows - 1)
    numbers = sorted(set(spread.tolist()))
    places = torch.tensor(numbers)
    # Each sampled row represents the rows up to halfway to its neighbours.
    between = (places[1:] + places[:-1]).double() / 2
    ends = torch.cat([between.new_tensor([-0.5]), between, between.new_tensor([rows - 0.5])])
    return numbers, ends.diff()


def _probabilities(logs: HeadScores, numbers: Sequence[int]) -> Float[Tensor, "heads some keys"]:
    sample = logs.pick(numbers)
    strip = sample.strip(slice(0, len(numbers)))
    P = logs.query.new_zeros(logs.heads, len(numbers), logs.tiles * logs.width)
    for tile in range(strip.tiles):
        L = P.new_empty(logs.heads, strip.height, logs.width)
        sample.put_log(L, strip, tile)
        torch.exp(L, out=P[..., tile * logs.width : (tile + 1) * logs.width])
    mass = P.sum(-1, keepdim=True)
    return P.div_(mass.masked_fill_(mass < 0.5, 1.0))[..., : logs.keys]


def _directions(D: Float[Tensor, "heads some keys"], count: int) -> Float[Tensor, "heads keys block"]:
    gram = (D @ D.mT).double()
    broken = ~gram.isfinite().all(-1).all(-1)[:, None, None]
    # Right singular vectors of D as images of the left ones: D has far fewer rows than columns.
    vectors = torch.linalg.eigh(gram.masked_fill(broken, 0.0)).eigenvectors[..., max(0, gram.shape[-1] + 1 - count) :]
    images = (D.mT @ vectors.to(D)).double()
    lengths = torch.linalg.vector_norm(images, dim=-2, keepdim=True)
    generator = torch.Generator().manual_seed(_SEED)
    chance = torch.randn(D.shape[-1], count, dtype=torch.float64, generator=generator).to(D.device, non_blocking=True)
    chance = chance.expand(len(D), -1, -1)
    found = torch.where(lengths > 0, images / lengths, chance[..., : images.shape[-1]])
    orthonormal: Tensor = torch.linalg.qr(torch.cat([found, chance[..., images.shape[-1] :]], -1)).Q
    return orthonormal


_STRIPS_PER_FLUSH = 8
_LEAST_MASS = 0.5
"""Rows were divided by their own sums, so a mass is 1 up to rounding, or 0 up to rounding if no key is visible."""


@dataclass(frozen=True)
class PassSums:
    """The results of one walk for each head, in float64.

    Attributes:
        mass: sum of each row of the exponentials, 1 up to rounding of the log-sums, 0 for a row that sees nothing.
        p_log_p: sum of p log p of each row of the exponentials.
        energy: sum of squares of D.
        column: sum of each column of D.
        total: sum of each column of DZ, Z the probes.
        gram: :math:`(DZ)^TDZ`.
        image: :math:`D^TDZ`, if requested.
    """

    mass: Float[Tensor, "heads rows"]
    p_log_p: Float[Tensor, "heads rows"]
    energy: Float[Tensor, " heads"]
    column: Float[Tensor, "heads keys"]
    total: Float[Tensor, "heads probes"]
    gram: Float[Tensor, "heads probes probes"]
    image: Float[Tensor, "heads keys probes"] | None


def attention_pass(
    scores: HeadScores,
    reference: Float[Tensor, "heads keys"],
    probes: Float[Tensor, "heads keys probes"],
    *,
    sums: bool = True,
    image: bool = False,
) -> PassSums:
    """Walk over all tiles once; tiles that are hidden from all rows of a strip are not computed.

    Tiles, and sums along a row within one tile, are in the dtype of ``scores``; everything else is float64.

    Args:
        scores: logarithms of probabilities, see :meth:`HeadScores.less`.
        reference: a row near the mean row of P, in float64.
        probes: Z, in float64; zero columns if no product is needed.
        sums: also compute ``p_log_p`` and ``energy``, which only the first walk needs.
        image: also compute D^T(DZ), for which one strip of rows by all keys is held in memory.
    """
    walk = _Walk(scores, reference, probes, image=image)
    rows = [walk.strip(strip, sums) for strip in scores.strips(held=image)]
    mass, p_log_p = (torch.cat(parts, -1) for parts in zip(*rows, strict=True)) if rows else (walk.empty, walk.empty)
    columns = walk.columns()
    found = columns[..., :-1] if image else None
    return PassSums(mass, p_log_p, walk.energy, columns[..., -1], walk.total, walk.gram, found)


class _Walk:
    """Accumulates the small results of a walk, strip by strip.

    A strip visits only the tiles that some of its rows can see. In the remaining tiles the probabilities are zero and
    D = -r. These are added in closed form: ``_beyond`` for products along rows, ``_hidden`` for sums along columns.
    What is kept by tile has the tiles as its first axis and the heads as its second.
    """

    def __init__(self, scores: HeadScores, reference: Tensor, probes: Tensor, *, image: bool) -> None:
        self._scores, self._image = scores, image
        like = scores.query
        heads, tiles, width, count = scores.heads, scores.tiles, scores.width, probes.shape[-1]
        padding = tiles * width - scores.keys
        # D is computed in the dtype of the tiles, so r must be the reference as rounded to that dtype.
        r = torch.nn.functional.pad(reference.to(like), (0, padding))
        self._r = r.view(heads, tiles, 1, width).transpose(0, 1)
        self._shifts = may_hold(r != 0)
        # One product of a tile with [Z, 1, r] gives DZ, the row sums (masses) and D r together.
        small = torch.cat([probes.to(like), like.new_ones(heads, scores.keys, 1)], -1)
        small = torch.cat([torch.nn.functional.pad(small, (0, 0, 0, padding)), r.unsqueeze(-1)], -1)
        # Stored transposed: a few rows times a transposed tile is the faster order of this product.
        self._small = small.view(heads, tiles, width, count + 2).permute(1, 0, 3, 2).contiguous()
        by_tile = (self._small.double() @ self._r.double().mT).squeeze(-1)
        # _beyond[t] is r^T [Z, 1, r] over the tiles from t on: minus the contribution of tiles that are not visited.
        self._beyond = torch.cat([by_tile.flip(0).cumsum(0).flip(0), by_tile.new_zeros(1, heads, count + 2)])
        self._room = like.new_empty(tiles if image else 1, heads, scores.height(held=image), width)
        self._recent = like.new_zeros(tiles, heads, count + 1 if image else 1, width)
        self._sum = torch.zeros_like(self._recent, dtype=torch.float64)
        self._hidden = by_tile.new_zeros(tiles + 1, *self._recent.shape[1:3])
        self._excess = torch.zeros_like(self._hidden[0])
        self._strips = 0
        self.empty = by_tile.new_zeros(heads, 0)
        self.energy = by_tile.new_zeros(heads)
        self.total = by_tile.new_zeros(heads, count)
        self.gram = by_tile.new_zeros(heads, count, count)

    def strip(self, strip: Strip, sums: bool) -> tuple[Tensor, Tensor]:
        """Add a few rows; returns their masses and sums of p log p."""
        products, squares, p_log_p = self._tiles(strip, sums)
        beyond, whole = self._beyond[strip.tiles].unsqueeze(1), self._beyond[0].unsqueeze(1)
        # Now all keys are included: the columns are D̃Z, D̃1 and D̃r with D̃ = P̃ - 1r^T.
        products = products - beyond
        # m = P̃1 = D̃1 + r^T 1.
        mass = products[..., -2] + whole[..., -2]
        mass = mass.masked_fill(mass < _LEAST_MASS, 0.0)
        inverse = torch.where(mass == 0, 1.0, 1 / mass)
        excess = 1 - inverse
        if sums:
            # |D_i|^2 = |D̃_i|^2 / m^2 - 2 (e/m) D̃_i.r + e^2 |r|^2. The first term was summed over the whole strip, so it
            # is divided by a mean mass; using each row's own mass would change it by rounding of a rounding error.
            self.energy += inverse.square().mean(-1) * (squares + strip.height * beyond[:, 0, -1])
            self.energy += (excess.square() * whole[..., -1] - 2 * inverse * excess * products[..., -1]).sum(-1)
        # W = DZ = D̃Z / m - e (r^T Z).
        W = inverse.unsqueeze(-1) * products[..., :-2] - excess.unsqueeze(-1) * whole[..., :-2]
        if W.shape[-1]:
            self.total += W.sum(-2)
            self.gram += W.mT @ W
        if self._image:
            ones = W.new_ones(*W.shape[:2], 1)
            self._multiply_back(strip, torch.cat([W, ones], -1), inverse, excess)
        else:
            self._hidden[strip.tiles] += strip.height
            self._excess += excess.sum(-1, keepdim=True)
        self._strips += 1
        # Column sums of a few strips are accumulated in the dtype of the tiles, then added to the float64 total.
        if self._strips % _STRIPS_PER_FLUSH == 0:
            self._flush()
        return mass, p_log_p

    def columns(self) -> Float[Tensor, "heads keys probes+1"]:
        r"""D^T times DZ, if requested, and D^T times 1.

        Without the image, the columns of :math:`\tilde D` were summed without dividing by the masses, and
        :math:`\sum_i e_i \tilde P_{ij}` is replaced by its mean part: the deviations of e and of the column are a
        rounding error times a small number, and are neglected.
        """
        self._flush()
        r = self._r.double()
        # _hidden[t] is the weight of the strips that stop before tile t; its running sum is the weight of all strips
        # that do not visit a tile, where D̃ = -r.
        whole = self._sum - self._hidden.cumsum(0)[:-1].unsqueeze(-1) * r
        if self._image:
            whole = whole - self._excess.unsqueeze(-1) * r
        else:
            whole = whole - self._excess.unsqueeze(-1) * (r + whole / max(1, self._scores.rows))
        return whole.permute(1, 0, 3, 2).flatten(1, 2)[:, : self._scores.keys]

    def _tiles(self, strip: Strip, sums: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Exponentials minus the reference, tile by tile: products with the small matrix, squares, sums of p log p.

        Sums are computed as matrix products (with ones, or with itself), which on a CPU is twice as fast as reductions.
        """
        heads, tiles, height, like = self._scores.heads, strip.tiles, strip.height, self._scores.query
        L = like.new_empty(heads, height, self._scores.width)
        ones, across = like.new_ones(heads, 1, height), like.new_ones(heads, 1, self._scores.width)
        products = like.new_empty(tiles, heads, self._small.shape[2], height)
        squares, p_log_p = like.new_zeros(tiles, heads, 1, 1), like.new_zeros(tiles, heads, 1, height)
        # Views are created before the loop: creating one costs as much as a tenth of the work on a tile.
        rooms = (self._room[:tiles] if self._image else self._room.expand(tiles, -1, -1, -1))[:, :, :height]
        views = zip(rooms, self._small, self._r, products, squares, p_log_p, self._recent, strict=False)
        LT, D = L.mT, rooms[0]
        flat, DT = _flat(D), D.mT
        # L holds log p, then p log p; D holds p, then p - r. With an image, D is kept for every tile of the strip.
        for tile, (room, small, r, product, square, row_sum, column) in enumerate(views):
            if self._image:
                D, flat, DT = room, _flat(room), room.mT
            self._scores.put_log(L, strip, tile)
            torch.exp(L, out=D)
            if sums:
                # L becomes p log p; its row sums are taken before D loses r.
                L.mul_(D)
                torch.bmm(across, LT, out=row_sum)
            if self._shifts:
                D.sub_(r)
            if sums:
                torch.bmm(flat, flat.mT, out=square)
            torch.bmm(small, DT, out=product)
            if not self._image:
                column.baddbmm_(ones, D)
        by_row = products.sum(0, dtype=torch.float64).mT
        return by_row, squares.sum((0, 2, 3), dtype=torch.float64), p_log_p.sum((0, 2), dtype=torch.float64)

    def _multiply_back(
        self, strip: Strip, W: Float[Tensor, "heads height probes+1"], inverse: Tensor, excess: Tensor
    ) -> None:
        D = self._room[: strip.tiles, :, : strip.height]
        # Round the weights once, here, so that hidden tiles get exactly the weights that visited tiles get.
        left = (inverse.unsqueeze(-1) * W).to(D).mT.contiguous()
        self._hidden[strip.tiles] += left.double().sum(-1)
        self._excess += (excess.unsqueeze(-2) @ W).squeeze(-2)
        recent = self._recent[: strip.tiles].flatten(0, 1)
        recent.baddbmm_(left.expand(strip.tiles, -1, -1, -1).flatten(0, 1), D.flatten(0, 1))

    def _flush(self) -> None:
        self._sum += self._recent
        self._recent.zero_()


def _flat(D: Float[Tensor, "heads height width"]) -> Float[Tensor, "heads 1 entries"]:
    """Each matrix as one row, in the same memory; a strip lower than its room is one only if there is a single head."""
    return D.view(D.shape[0], 1, -1)


PASS_ENTRIES = 1 << 30
"""How many probabilities of one head the iterations for its largest singular value may visit by default."""

_MOST_PASSES = 400
_TOLERANCE = {True: 1e-10, False: 1e-5}
_UNKNOWN = SingularValue(math.nan, math.nan, False, 0)


@dataclass(frozen=True)
class _PartSums:
    mass: Float[Tensor, "heads rows"]
    p_log_p: Float[Tensor, "heads rows"]
    first_mass: Float[Tensor, "heads rows"]
    own_mass: Float[Tensor, "heads rows"]
    energy: Float[Tensor, " heads"]
    centred_energy: Float[Tensor, " heads"]
    tops: list[SingularValue]


class BlockwiseAttention(AttentionView):
    r"""Attention probabilities of ``query`` and ``key``, computed tile by tile when a reduction is requested.

    All sums come from one walk over the tiles of each head; small heads are walked together. Memory is linear in the
    number of tokens. The largest singular value of CP takes further walks, until it converges or ``passes`` are used
    up; in the latter case it is the lower bound reached so far, and :attr:`is_spectrum_estimated` is True. Tiles are in
    the dtype of ``query`` (float32 for half precision), sums over tiles in float64.

    Args:
        query: ``(batch, heads, query, dim)``.
        key: ``(batch, key heads, key, dim)``; heads must be a multiple of key heads (grouped queries).
        mask: broadcastable to ``(batch, heads, query, key)``: True where a key is visible, or an additive mask.
        is_causal: a row sees keys up to its own position, counted from the first.
        scale: scale of the scores, 1/sqrt(dim) by default.
        keep: which query rows count, ``(batch, query)``.
        log_sums: logarithm of each row's sum of exponentials ``(batch, heads, query)``, if the kernel returned it;
            this saves a walk.
        spectrum: whether the largest singular value will be needed: the first walk then computes part of it.
        passes: walks per head for the largest singular value; by default as many as :data:`PASS_ENTRIES` allows.

    Raises:
        InputError: shapes that do not fit.

    Example:
        >>> q = torch.zeros(1, 1, 4, 2)
        >>> view = BlockwiseAttention(q, q)
        >>> round(float(view.relative_deviation), 12)
        0.0
    """

    def __init__(
        self,
        query: Float[Tensor, "batch heads query dim"],
        key: Float[Tensor, "batch key_heads key dim"],
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        keep: Bool[Tensor, "batch query"] | None = None,
        log_sums: Float[Tensor, "batch heads query"] | None = None,
        spectrum: bool = False,
        passes: int | None = None,
    ) -> None:
        _check(query, key, keep, passes)
        home = float64_home(query)
        self._query, self._key = query.detach().to(home), key.detach().to(home)
        self.batch_shape = tuple(query.shape[:2])
        self.keys = key.shape[2]
        self._scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        self._keep = None if keep is None else keep.detach().to(home)
        self._log_sums = None if log_sums is None else log_sums.detach().to(home)
        shape = (query.shape[0], query.shape[1], query.shape[2], self.keys)
        self._support = SupportRows(shape, home, None if mask is None else mask.detach().to(home), is_causal=is_causal)
        self._spectrum, self._passes = spectrum, passes

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tiles."""
        return torch.promote_types(self._query.dtype, torch.float32)

    @cached_property
    def kept(self) -> Bool[Tensor, "matrices query"]:
        """Which rows count."""
        shape = (*self.batch_shape, self._query.shape[2])
        if self._keep is None:
            return torch.ones(shape, dtype=torch.bool, device=self._query.device).flatten(0, 1)
        return self._keep.unsqueeze(1).expand(shape).flatten(0, 1)

    @cached_property
    def count(self) -> Float[Tensor, " matrices"]:
        """Number of query rows that count."""
        return self.kept.sum(-1).double()

    @property
    def fewest(self) -> int:
        """A number of rows that every matrix has at least."""
        return self._query.shape[2] if self._keep is None else 0

    @property
    def support_size(self) -> Float[Tensor, "matrices query"]:
        """Number of keys each row may see."""
        return self._support.size

    @property
    def sees_first(self) -> Bool[Tensor, "matrices query"]:
        """Whether a row may see the first key."""
        return self._support.sees_first

    @cached_property
    def sums(self) -> AttentionSums:
        """Mass, p log p and squares; rows that do not count have mass 1."""
        found = self._parts
        return AttentionSums(
            self._by_row([part.mass for part in found], 1.0),
            self._by_row([part.p_log_p for part in found], 0.0),
            self._by_matrix([part.energy for part in found]),
            self._by_matrix([part.centred_energy for part in found]),
        )

    @cached_property
    def first_mass(self) -> Float[Tensor, "matrices query"]:
        """Probability that each row gives to the first key; 0 in rows that do not count."""
        return self._by_row([part.first_mass for part in self._parts], 0.0)

    @property
    def sees_itself(self) -> Bool[Tensor, "matrices query"]:
        """Whether a row may see the key at its own position."""
        return self._support.sees_itself

    @cached_property
    def own_mass(self) -> Float[Tensor, "matrices query"]:
        """Probability that each row gives to the key at its own position; 0 in rows that do not count."""
        return self._by_row([part.own_mass for part in self._parts], 0.0)

    @property
    def largest_centred_singular_value(self) -> Float[Tensor, " matrices"]:
        """Largest singular value of CP, or a lower bound on it; NaN for P = 0."""
        return self._of_tops([top.lower for top in self.singular_values])

    @property
    def centred_singular_value_bound(self) -> Float[Tensor, " matrices"]:
        """Upper bound on the largest singular value of CP, up to rounding; NaN for P = 0."""
        return self._of_tops([top.upper for top in self.singular_values])

    @property
    def is_spectrum_estimated(self) -> Bool[Tensor, " matrices"]:
        """Where the iterations for the largest singular value did not converge."""
        return self._of_tops([top.is_estimate for top in self.singular_values]).bool()

    @cached_property
    def singular_values(self) -> list[SingularValue]:
        """The largest singular value of CP of each matrix, with an interval that contains it."""
        found = self._parts if self._spectrum else self._read_all(spectrum=True)
        return [top for part in found for top in part.tops]

    @cached_property
    def _parts(self) -> list[_PartSums]:
        return self._read_all(spectrum=self._spectrum)

    def _read_all(self, *, spectrum: bool) -> list[_PartSums]:
        return [self._read(part, spectrum) for part in parts(self._query, self._key, self._positions)]

    def _read(self, part: Part, spectrum: bool) -> _PartSums:
        logs = self._logs(part)
        passes = self._budget(logs.rows)
        reference, probes = attention_start(logs, directions=spectrum)
        first = attention_pass(logs, reference, probes, image=spectrum and passes > 1)
        r = reference.to(self.dtype).double()
        n = logs.rows
        # The mean row of P is r + shift, so |CP|^2 = |D|^2 - n |shift|^2 and |P|^2 = |CP|^2 + n |r + shift|^2.
        shift = first.column / max(1, n)
        centred = (first.energy - n * shift.square().sum(-1)).clamp_min(0.0)
        energy = centred + n * (r + shift).square().sum(-1)
        # Exponentials of hidden keys are tiny, not zero: if no row sees a key they would be all there is, and P = 0.
        is_empty = first.mass == 0
        energy = energy.masked_fill(is_empty.all(-1), 0.0)
        # The sink rate needs a single column, which is cheaper to recompute than to pick out of the walk.
        key = self._support.first_key[part].flatten()
        mass = first.mass.masked_fill(is_empty, 1.0)
        at_first, at_own = _column(logs, key).double() / mass, _diagonal(logs).double() / mass
        tops = self._tops(logs, r, probes, first, energy, centred, passes) if spectrum else [_UNKNOWN] * logs.heads
        return _PartSums(first.mass, first.p_log_p, at_first, at_own, energy, centred, tops)

    def _logs(self, part: Part) -> HeadScores:
        """Logarithms of the probabilities of the rows that count."""
        scores = HeadScores.of(
            self._query[part].flatten(0, 1),
            keys_of(part, self._key, self.batch_shape[1] // self._key.shape[1]),
            self._scale,
            self._positions[part[0].start],
            causal=self._support.is_causal,
            mask=self._support.mask_of(part),
        )
        if self._log_sums is None:
            largest, rest = row_log_sums(scores)
            shift, later = largest + rest, torch.zeros_like(rest)
        else:
            shift = self._log_sums[part].flatten(0, 1)[:, scores.places].to(scores.query)
            later = torch.zeros_like(shift)
        # If a huge negative number hides every key of a row, adding it rounds the scores away and the row is uniform.
        # Such rows get zero scores, and their log-sum is subtracted after the mask, where it is not rounded away.
        hidden = shift.abs() * torch.finfo(self.dtype).eps > 0.25
        numbers = self._rows_with_hidden(hidden)
        if not numbers:
            return scores.less(shift)
        scores = replace(scores, query=scores.query.masked_fill(hidden.unsqueeze(-1), 0.0))
        largest, rest = row_log_sums(scores.pick(numbers))
        places = torch.tensor(numbers).to(shift.device, non_blocking=True)
        shift = torch.where(hidden, shift.index_copy(-1, places, largest), shift)
        later = torch.where(hidden, later.index_copy(-1, places, rest), later)
        return scores.less(shift, later)

    def _rows_with_hidden(self, hidden: Bool[Tensor, "heads rows"]) -> Sequence[int]:
        """Rows of which some head is hidden by adding; on an accelerator, where the host does not learn it, all."""
        if hidden.device.type == "cpu":
            found: list[int] = hidden.any(0).nonzero().flatten().tolist()
            return found
        return range(hidden.shape[-1]) if self._support.may_hide_by_adding else ()

    @cached_property
    def _positions(self) -> Sequence[Sequence[int]]:
        """The positions of the rows that count, of each sequence, on the host."""
        if self._keep is None:
            return [range(self._query.shape[2])] * self.batch_shape[0]
        return [row.nonzero().flatten().tolist() for row in self._keep.cpu()]

    def _budget(self, rows: int) -> int:
        """How many walks the largest singular value may take."""
        affordable = max(1, min(_MOST_PASSES, PASS_ENTRIES // max(1, rows * self.keys)))
        return affordable if self._passes is None else self._passes

    def _tops(
        self,
        logs: HeadScores,
        r: Tensor,
        probes: Tensor,
        first: PassSums,
        energy: Tensor,
        centred_energy: Tensor,
        passes: int,
    ) -> list[SingularValue]:
        """The largest singular values. Small matrices are on the host, whose LAPACK is the faster one for them."""
        n = logs.rows
        # |CP|_2^2 <= |P|_2^2 <= |P|_1 |P|_inf, and rows sum to one: the bound is the root of the largest column sum.
        upper = (first.column + n * r).amax(-1).clamp_min(0.0).sqrt()
        defined = (energy > 0) & energy.isfinite()
        known, energies, bounds = torch.stack([defined.double(), centred_energy, upper]).cpu().tolist()
        tolerance = _TOLERANCE[is_wide(self.dtype)]
        if first.image is None:
            grams = (first.gram - first.total.unsqueeze(-1) * first.total.unsqueeze(-2) / n).cpu()
            return [
                singular_value_within(gram, inside, bound, tolerance=tolerance) if is_known else _UNKNOWN
                for is_known, gram, inside, bound in zip(known, grams, energies, bounds, strict=True)
            ]
        numbers = [number for number, is_known in enumerate(known) if is_known]

        @functools.lru_cache(maxsize=1)
        def only(which: tuple[int, ...]) -> tuple[HeadScores, Tensor]:
            if len(which) == logs.heads:
                return logs, r
            chosen = torch.tensor([numbers[one] for one in which]).to(r.device, non_blocking=True)
            return logs.only(chosen), r[chosen]

        def centred(found: PassSums) -> Tensor:
            # (CD)^T CDZ = D^T DZ - (D^T 1)(1^T DZ) / n.
            assert found.image is not None
            return (found.image - (found.column / n).unsqueeze(-1) * found.total.unsqueeze(-2)).cpu()

        def normal(which: Sequence[int], Z: Tensor) -> Tensor:
            some, reference = only(tuple(which))
            return centred(attention_pass(some, reference, Z.to(r.device, non_blocking=True), sums=False, image=True))

        tops = largest_singular_values(
            normal,
            probes.cpu()[numbers],
            centred(first)[numbers],
            [energies[number] for number in numbers],
            upper=[bounds[number] for number in numbers],
            passes=passes,
            tolerance=tolerance,
        )
        found = dict(zip(numbers, tops, strict=True))
        return [found.get(number, _UNKNOWN) for number in range(logs.heads)]

    def _by_row(self, parts: list[Tensor], otherwise: float) -> Tensor:
        found = torch.full(self.kept.shape, otherwise, dtype=torch.float64, device=self._query.device)
        return found.masked_scatter_(self.kept, torch.cat([part.flatten() for part in parts])) if parts else found

    def _by_matrix(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts) if parts else self.count.new_zeros(0)

    def _of_tops(self, values: list[float] | list[bool]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._query.device)


def _column(logs: HeadScores, key: Int[Tensor, " heads"]) -> Float[Tensor, "heads rows"]:
    """The exponentials of one column of each head."""
    place = key[:, None, None]
    logarithm = (logs.query @ logs.key.gather(1, place.expand(-1, 1, logs.key.shape[-1])).mT).squeeze(-1)
    if logs.mask is not None:
        column = logs.mask.gather(-1, place.expand(-1, logs.mask.shape[1], 1)).squeeze(-1)[:, logs.places]
        visible = column.dtype == torch.bool
        logarithm = logarithm.masked_fill(~column, -torch.inf) if visible else logarithm + column
    if logs.later is not None:
        logarithm = logarithm - logs.later
    return logarithm.masked_fill(logs.places < key[:, None], -torch.inf).exp() if logs.causal else logarithm.exp()


def _diagonal(logs: HeadScores) -> Float[Tensor, "heads rows"]:
    """The exponentials at each row's own position; 0 where there is no such key."""
    exists = logs.places < logs.keys
    own = logs.places.clamp_max(logs.keys - 1)
    logarithm = (logs.query * logs.key[:, own]).sum(-1)
    if logs.mask is not None:
        entry = logs.mask[:, logs.places, own]
        visible = entry.dtype == torch.bool
        logarithm = logarithm.masked_fill(~entry, -torch.inf) if visible else logarithm + entry
    if logs.later is not None:
        logarithm = logarithm - logs.later
    return logarithm.masked_fill(~exists, -torch.inf).exp()


def _check(query: Tensor, key: Tensor, keep: Tensor | None, passes: int | None) -> None:
    fits = query.ndim == key.ndim == 4 and query.shape[0] == key.shape[0] and query.shape[-1] == key.shape[-1]
    if not fits or key.shape[2] == 0 or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise InputError(
            f"query has the shape {tuple(query.shape)} and key {tuple(key.shape)}. Expected (batch, heads, tokens, "
            "dim) of the same batch and dim, at least one key, and heads of query a multiple of those of key."
        )
    expected = (query.shape[0], query.shape[2])
    if keep is not None and (keep.dtype != torch.bool or tuple(keep.shape) != expected):
        raise InputError(
            f"keep is a {keep.dtype} tensor of shape {tuple(keep.shape)}. Expected booleans of shape {expected}, "
            "one per query: pass attention_mask.bool()."
        )
    if passes is not None and passes < 1:
        raise InputError(f"passes={passes}: expected at least one walk per head.")
