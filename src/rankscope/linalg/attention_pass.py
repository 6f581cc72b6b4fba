r"""One walk over the tiles of an attention matrix that yields all its sums and a product with it.

Everything is taken of :math:`D = P - 1r^T` with a reference row r near the mean row: CP = CD, and sums of squares of D
do not cancel when rows are nearly equal, as those of P would. The exponentials are :math:`\tilde P = \mathrm{diag}(m)P`
with masses m that differ from 1 by the rounding of each row's log-sum. What that does is undone on the small results:

.. math:: D = \mathrm{diag}(1/m)\tilde D - e r^T, \qquad \tilde D = \tilde P - 1r^T, \quad e = 1 - 1/m .
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.linalg.score_tiles import HeadScores, Strip

_STRIPS_PER_FLUSH = 8
_LEAST_MASS = 0.5
"""Rows were divided by their own sums, so that a mass is about 1, or 0 and rounding where no key is visible."""


@dataclass(frozen=True)
class PassSums:
    """What one walk gives, in float64.

    Attributes:
        mass: sum of each row of the exponentials, 1 up to rounding of the log-sums, 0 for a row that sees nothing.
        p_log_p: sum of p log p of each row of the exponentials.
        energy: sum of squares of D.
        column: sum of each column of D.
        total: sum of each column of DZ, Z the probes.
        gram: :math:`(DZ)^TDZ`.
        image: :math:`D^TDZ`, where it was asked for.
    """

    mass: Float[Tensor, " rows"]
    p_log_p: Float[Tensor, " rows"]
    energy: Float[Tensor, ""]
    column: Float[Tensor, " keys"]
    total: Float[Tensor, " probes"]
    gram: Float[Tensor, "probes probes"]
    image: Float[Tensor, "keys probes"] | None


def attention_pass(
    scores: HeadScores,
    reference: Float[Tensor, " keys"],
    probes: Float[Tensor, "keys probes"],
    *,
    sums: bool = True,
    image: bool = False,
) -> PassSums:
    """Walk over all tiles once; tiles that no row of a strip sees are not computed.

    Tiles are in the format of ``scores``, and so are sums along a row within one tile; everything else is float64.

    Args:
        scores: logarithms of probabilities, see :meth:`HeadScores.less`.
        reference: a row near the mean row of P, in float64.
        probes: Z, in float64; no column where no product is wanted.
        sums: also take ``p_log_p`` and ``energy``, which a later walk needs no more.
        image: also multiply back, for which a strip of rows by all keys is kept at a time.
    """
    walk = _Walk(scores, reference, probes, image=image)
    rows = [walk.strip(strip, sums) for strip in scores.strips(held=image)]
    mass, p_log_p = (torch.cat(parts) for parts in zip(*rows, strict=True)) if rows else (walk.empty, walk.empty)
    columns = walk.columns()
    found = columns[:, :-1] if image else None
    return PassSums(mass, p_log_p, walk.energy, columns[:, -1], walk.total, walk.gram, found)


class _Walk:
    """Small results of a walk, gathered strip by strip."""

    def __init__(self, scores: HeadScores, reference: Tensor, probes: Tensor, *, image: bool) -> None:
        self._scores, self._image = scores, image
        like = scores.query
        tiles, width, count = scores.tiles, scores.width, probes.shape[1]
        padding = tiles * width - scores.keys
        # What D is really computed with is the reference as rounded to the tiles' format.
        r = torch.nn.functional.pad(reference.to(like), (0, padding))
        self._r = r.view(tiles, width)
        self._shifts = bool(r.any())
        small = torch.cat([probes.to(like), like.new_ones(scores.keys, 1)], -1)
        small = torch.cat([torch.nn.functional.pad(small, (0, 0, 0, padding)), r.unsqueeze(-1)], -1)
        # Few rows times a transposed tile is the faster order of this product.
        self._small = small.view(tiles, width, count + 2).transpose(1, 2).contiguous()
        by_tile = torch.einsum("tw,tcw->tc", self._r.double(), self._small.double())
        # r times the probes, 1 and r, summed over all tiles from one on: what hidden keys add.
        self._beyond = torch.cat([by_tile.flip(0).cumsum(0).flip(0), by_tile.new_zeros(1, count + 2)])
        self._room = like.new_empty(tiles if image else 1, scores.height(held=image), width)
        self._recent = like.new_zeros(tiles, count + 1 if image else 1, width)
        self._sum = torch.zeros_like(self._recent, dtype=torch.float64)
        self._hidden = by_tile.new_zeros(tiles + 1, self._recent.shape[1])
        self._excess = by_tile.new_zeros(self._recent.shape[1])
        self._strips = 0
        self.empty = by_tile.new_zeros(0)
        self.energy = by_tile.new_zeros(())
        self.total = by_tile.new_zeros(count)
        self.gram = by_tile.new_zeros(count, count)

    def strip(self, strip: Strip, sums: bool) -> tuple[Tensor, Tensor]:
        """Take in a few rows; their masses and sums of p log p."""
        products, squares, p_log_p = self._tiles(strip, sums)
        beyond, whole = self._beyond[strip.tiles], self._beyond[0]
        products = products - beyond
        mass = products[:, -2] + whole[-2]
        mass = mass.masked_fill(mass < _LEAST_MASS, 0.0)
        inverse = torch.where(mass == 0, 1.0, 1 / mass)
        excess = 1 - inverse
        if sums:
            # Squares were summed over the strip; each row's own mass would change that by rounding of rounding.
            self.energy += inverse.square().mean() * (squares + strip.height * beyond[-1])
            self.energy += (excess.square() * whole[-1] - 2 * inverse * excess * products[:, -1]).sum()
        W = inverse.unsqueeze(-1) * products[:, :-2] - excess.unsqueeze(-1) * whole[:-2]
        self.total += W.sum(0)
        self.gram += W.T @ W
        if self._image:
            self._multiply_back(strip, torch.cat([W, W.new_ones(strip.height, 1)], -1), inverse, excess)
        else:
            self._hidden[strip.tiles] += strip.height
            self._excess += excess.sum()
        self._strips += 1
        if self._strips % _STRIPS_PER_FLUSH == 0:
            self._flush()
        return mass, p_log_p

    def columns(self) -> Float[Tensor, "keys probes+1"]:
        r"""D^T times DZ, where it was asked for, and 1.

        Without, the columns of :math:`\tilde D` were summed as they are, and :math:`\sum_i e_i \tilde P_{ij}` is taken
        for its mean part: deviations of e and of the column are rounding times the small, and are left out.
        """
        self._flush()
        r = self._r.double().unsqueeze(1)
        whole = self._sum - self._hidden.cumsum(0)[:-1].unsqueeze(-1) * r
        if self._image:
            whole = whole - self._excess.unsqueeze(-1) * r
        else:
            whole = whole - self._excess * (r + whole / max(1, self._scores.rows))
        return whole.transpose(1, 2).reshape(-1, whole.shape[1])[: self._scores.keys]

    def _tiles(self, strip: Strip, sums: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Exponentials minus the reference, tile by tile: products with the small matrix, squares, sums of p log p.

        Sums are taken as products with ones and with itself: on a processor that is twice as fast as reductions.
        """
        tiles, height, like = strip.tiles, strip.height, self._r
        L = like.new_empty(height, self._scores.width)
        ones, across = like.new_ones(1, height), like.new_ones(1, self._scores.width)
        products = like.new_empty(tiles, self._small.shape[1], height)
        squares, p_log_p = [like.new_zeros(())], like.new_zeros(tiles, 1, height)
        # Views are made beforehand: one costs as much as a tenth of the work on a tile.
        rooms = (self._room[:tiles] if self._image else self._room.expand(tiles, -1, -1))[:, :height]
        views = zip(rooms, self._small, self._r, products, p_log_p, self._recent, strict=False)
        LT, D = L.T, rooms[0]
        flat, DT = D.view(-1), D.T
        for tile, (room, small, r, product, row_sum, column) in enumerate(views):
            if self._image:
                D, flat, DT = room, room.view(-1), room.T
            self._scores.put_log(L, strip, tile)
            torch.exp(L, out=D)
            if sums:
                L.mul_(D)
                torch.mm(across, LT, out=row_sum)
            if self._shifts:
                D.sub_(r)
            if sums:
                squares.append(torch.dot(flat, flat))
            torch.mm(small, DT, out=product)
            if not self._image:
                column.addmm_(ones, D)
        by_row = products.sum(0, dtype=torch.float64).T
        return by_row, torch.stack(squares).sum(dtype=torch.float64), p_log_p.sum((0, 1), dtype=torch.float64)

    def _multiply_back(
        self, strip: Strip, W: Float[Tensor, "height probes+1"], inverse: Tensor, excess: Tensor
    ) -> None:
        D = self._room[: strip.tiles, : strip.height]
        # Rounded once, here: hidden tiles must get the weights that the others get.
        left = (inverse.unsqueeze(-1) * W).to(D).T.contiguous()
        self._hidden[strip.tiles] += left.double().sum(-1)
        self._excess += excess @ W
        self._recent[: strip.tiles].baddbmm_(left.expand(strip.tiles, -1, -1), D)

    def _flush(self) -> None:
        self._sum += self._recent
        self._recent.zero_()
