"""Accuracies that need no comparison between tokens: the baselines of the trained networks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable

from torch import Tensor

from rankscope.ext.papers.training.tasks import Examples

CONSTANT, POSITION, ALONE, TWINS = "constant", "position", "token alone", "twins"


def guesses(examples: Examples, *, positions: bool) -> dict[str, float]:
    """Accuracies of the best answers that use little, each the best on these very examples. Exact.

    ``constant``: one answer for all tokens. ``position``: one per position, if the model knows positions.
    ``token alone``: one per token id (and position), the most that a path past all attention can reach; for ids only.
    ``twins``: one per token id and sentence, the most any model without positions can reach.

    Example:
        >>> import torch
        >>> data = Examples({"input_ids": torch.tensor([[5, 5, 6]])}, torch.tensor([[0, 1, 1]]))
        >>> guesses(data, positions=False)
        {'constant': 0.6666666666666666, 'token alone': 0.6666666666666666, 'twins': 0.6666666666666666}
    """
    labels = examples.labels.tolist()
    ids = examples.inputs["input_ids"].tolist() if "input_ids" in examples.inputs else None
    cells = [(row, place) for row, line in enumerate(labels) for place, label in enumerate(line) if label >= 0]

    def best(known: Iterable[Hashable]) -> float:
        groups: dict[Hashable, Counter[int]] = defaultdict(Counter)
        for (row, place), key in zip(cells, known, strict=True):
            groups[key][labels[row][place]] += 1
        return sum(max(answers.values()) for answers in groups.values()) / len(cells)

    accuracies = {CONSTANT: best(0 for _ in cells)}
    if positions:
        accuracies[POSITION] = best(place for _, place in cells)
    if ids is not None:
        accuracies[ALONE] = best((ids[row][place], place if positions else None) for row, place in cells)
        if not positions:
            accuracies[TWINS] = best((row, ids[row][place]) for row, place in cells)
    return accuracies


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
