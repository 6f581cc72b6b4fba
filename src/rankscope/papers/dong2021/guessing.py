"""What can be had without looking at other tokens, read off the data: the lines a path has to beat."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable

from rankscope.papers.training.tasks import Examples

CONSTANT, POSITION, ALONE, TWINS = "constant", "position", "token alone", "twins"


def guesses(examples: Examples, *, positions: bool) -> dict[str, float]:
    """Accuracies of the best answers that know little, each the best on these very examples. Exact.

    ``constant``: one answer for all tokens. ``position``: one per position, where the model knows positions.
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

    found = {CONSTANT: best(0 for _ in cells)}
    if positions:
        found[POSITION] = best(place for _, place in cells)
    if ids is not None:
        found[ALONE] = best((ids[row][place], place if positions else None) for row, place in cells)
        if not positions:
            found[TWINS] = best((row, ids[row][place]) for row, place in cells)
    return found
