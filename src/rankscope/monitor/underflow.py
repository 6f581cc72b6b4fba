"""Which share of the gradients a number format of too small a range has rounded to zero."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rankscope.linalg.to_host import to_host
from rankscope.models.wrapping import is_distributed
from rankscope.monitor.parameters import is_readable, sampled, tensors_of
from rankscope.monitor.readings import LayerValue, fact

FEW_ZEROS = 0.2
"""Share of its entries up to which zeros of a gradient are not looked at further."""
LEAST = 8
"""Entries that have to be small multiples of one number, before that is no accident."""
MULTIPLES = 16
"""Multiples that are compared with whole numbers."""
SMALL = 4
"""Multiple up to which half of the entries that are not zero have to be: the smaller ones are missing then."""
WHOLE = 0.01
MUCH = 0.25
"""Share of the entries that is lost, from which on matrices whose gradient is zero altogether are taken to be lost too:
in a backward pass in float16, underflow takes whole blocks."""


def lost_to_underflow(model: nn.Module) -> Iterator[LayerValue]:
    """The share of the gradients of all matrices that was rounded to zero, and what the other entries are multiples of.

    Below its smallest normal number, a format has nothing but the multiples of one number, and rounds what is less than
    half of it to zero. A zero counts as lost only if the entries of its matrix that are not zero are such multiples,
    and small ones. Rows of an embedding that no token uses, units that are off, experts without tokens, branches that
    begin at zero and masks leave zeros beside entries of any size, and are not counted; neither are entries of one
    size, which signs of gradients have. A loss scale, clipping and sums over batches and processes keep the multiples.
    Matrices whose gradient is zero count if much of the others is lost. **Estimate** from a sample, in this process.
    """
    gradients = [tensor for _, tensor in tensors_of(model, "gradient") if tensor.dim() > 1 and is_readable(tensor)]
    # A shard of a gradient is as good a sample: the first process tells the others.
    own = [cast(Any, tensor).to_local() if is_distributed(tensor) else tensor for tensor in gradients]
    samples = to_host([sampled(tensor) for tensor in own])
    if not samples:
        return
    table = nn.utils.rnn.pad_sequence([sample.double() for sample in samples], batch_first=True)
    counts = (table != 0.0).sum(1).tolist()
    total = sum(len(sample) for sample, count in zip(samples, counts, strict=True) if count)
    grids = [
        (len(sample) - count, grid)
        for sample, count in zip(samples, counts, strict=True)
        if 0 < count < (1.0 - FEW_ZEROS) * len(sample) and (grid := _grid(sample)) is not None
    ]
    is_all = len(grids) == sum(map(bool, counts))
    spacings = [grid.spacing for _, grid in grids if grid.is_certain] or _together([grid for _, grid in grids], is_all)
    # Where few entries are left, they may all be of one size: it has to be that of the other matrices.
    lost = sum(zeros for zeros, grid in grids if any(_is_whole(grid.spacing / one) for one in spacings))
    if 0 < MUCH * total <= lost:
        gone = sum(len(sample) for sample, count in zip(samples, counts, strict=True) if not count)
        lost, total = lost + gone, total + gone
    yield fact("gradient_underflow", "gradients", lost / max(1, total))
    if lost:
        yield fact("gradient_spacing", "gradients", min(spacings))


@dataclass(frozen=True)
class _Grid:
    """The entries of a sample that are not zero are small multiples of a number."""

    spacing: float
    near: int
    largest: float

    @property
    def is_certain(self) -> bool:
        """Entries of random size are no such multiples: that eight of them are is less than one in 10^11."""
        return self.near >= LEAST and self.largest > 1.5


def _grid(sample: Tensor) -> _Grid | None:
    sizes = sample[sample != 0].double().abs()
    ratios = sizes / sizes.min()
    near = ratios[ratios <= MULTIPLES]
    if not len(near) or not _is_whole(near) or 2 * int((ratios < SMALL + WHOLE).sum()) < len(sizes):
        return None
    return _Grid(float(sizes.min()), len(near), float(near.max()))


def _together(grids: Sequence[_Grid], is_all: bool) -> list[float]:
    """The number of which the entries of all matrices are multiples, if none of them is certain by itself.

    They may all be of one size if every gradient is sparse: most matrices of signs have no zeros.
    """
    least = min((grid.spacing for grid in grids), default=math.nan)
    spread = max((grid.largest * grid.spacing / least for grid in grids), default=0.0)
    joint = _Grid(least, sum(grid.near for grid in grids), 2.0 if is_all else spread)
    return [least] if joint.is_certain and all(_is_whole(grid.spacing / least) for grid in grids) else []


def _is_whole(ratio: Tensor | float) -> bool:
    ratios = torch.as_tensor(ratio, dtype=torch.float64)
    return bool(((ratios - ratios.round()).abs() <= WHOLE).all()) and bool((ratios > 0.5).all())
