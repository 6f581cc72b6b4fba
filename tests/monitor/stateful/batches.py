"""Batches of unequal size and length, one of them for each of several ranks and one too many."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.reference.sides import EXAMPLES


def token_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    found = []
    for sequences in (1, 4, 2):
        x = torch.randn(sequences, 7, 5, generator=generator) + 1.0
        mask = (torch.arange(7) < torch.randint(2, 8, (sequences, 1), generator=generator)).long()
        found.append((x, mask))
    found[1][1][2] = torch.tensor([1, 0, 0, 0, 0, 0, 0])  # one token has no residual
    return found


def batches_of(side: str) -> list[tuple[tuple[Tensor, ...], Tensor]]:
    """Tensors of any other side, each batch with its mask."""
    found = []
    for number, sequences in enumerate((1, 4, 2)):
        mask = (torch.arange(7) < torch.arange(2, 2 + sequences)[:, None]).long()
        found.append((EXAMPLES[side](number, sequences), mask))
    return found


def attention_batches() -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.einsum("bid,bjd->bij", x, x).masked_fill(mask[:, None] == 0, -torch.inf).softmax(-1)[:, None], mask)
        for x, mask in token_batches()
    ]
