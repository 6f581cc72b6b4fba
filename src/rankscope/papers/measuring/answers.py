"""What can be got right without keeping tokens apart: the lines a trained network is held against."""

from __future__ import annotations

from torch import Tensor


def one_answer_per_sequence(labels: Tensor) -> float:
    """Share of labels that are right when each sequence gets one answer for all its tokens, the best one for it.

    **Exact**, and a bound: no network whose tokens are all equal after the last block can do better. Labels below zero
    do not count.

    Example:
        >>> import torch
        >>> one_answer_per_sequence(torch.tensor([[1, 1, 2, 3], [5, 5, 5, -1]]))
        0.7142857142857143
    """
    best = [int(row[row >= 0].bincount().max()) for row in labels]
    return sum(best) / int((labels >= 0).sum())


def one_answer_for_all(learnt: Tensor, held: Tensor) -> float:
    """Share of ``held`` that is the commonest label of ``learnt``."""
    return float((held == learnt.flatten().mode().values).double().mean())


def one_answer_per_position(learnt: Tensor, held: Tensor) -> float:
    """Share of ``held`` that is the commonest label of ``learnt`` at its position."""
    return float((held == learnt.mode(dim=0).values).double().mean())
