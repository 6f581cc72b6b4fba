"""Which channels outweigh the others, and what is seen in the rest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

if TYPE_CHECKING:
    from rankscope.linalg.tokens import Tokens

OUTLIER = 100.0
"""A channel of more than this many times the median energy is an outlier: ten times in amplitude. The largest of 4096
Gaussian channels is at 35 times the median, so that ordinary channels are none."""


def outlier_energy(energy: Float[Tensor, "sequences dim"]) -> Float[Tensor, "sequences 1"]:
    """The energy above which a channel is an outlier. Channels that are zero have no say in the median."""
    return OUTLIER * energy.masked_fill(energy == 0, math.nan).nanmedian(-1, keepdim=True).values


def is_resolved(tokens: Tokens, floor: float) -> Bool[Tensor, " sequences"]:
    """Whether tokens differ by more than rounding in some outlier channel, or in the other channels together."""
    deviation = tokens.zeros(tokens.dim)
    room = tokens.room()
    for group, rows in tokens.pieces():
        deviation[group] += tokens.centred_piece(group, rows, room).square_().sum(-2)
    energy = tokens.energies.channel
    outlier = energy > outlier_energy(energy)
    alone = outlier & (deviation > floor**2 * energy)
    rest = [part.masked_fill(outlier, 0.0).sum(-1) for part in (deviation, energy)]
    return alone.any(-1) | (torch.sqrt(rest[0]) > floor * torch.sqrt(rest[1]))
