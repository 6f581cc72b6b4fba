"""Scores with their offset and scale set right."""

from __future__ import annotations

import torch

from rankscope.ext.papers.dong2021_paths.run import recentred


def test_an_offset_and_a_factor_are_undone() -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = [torch.randn(3, 4, 2, generator=generator, dtype=torch.float64) for _ in range(2)]
    labels = [torch.zeros(3, 4, dtype=torch.long) for _ in range(2)]
    moved = [0.01 * part + torch.tensor([5.0, -7.0]) for part in wanted]
    for found, part in zip(recentred(moved, wanted, labels), wanted, strict=True):
        torch.testing.assert_close(found, part)


def test_padding_does_not_count() -> None:
    wanted, labels = torch.tensor([[[0.0, 1.0], [2.0, -1.0], [9.0, 9.0]]]), torch.tensor([[0, 1, -100]])
    moved = wanted.clone()
    moved[0, 2] = 1e6
    torch.testing.assert_close(recentred([moved], [wanted], [labels])[0][0, :2], wanted[0, :2].double())
