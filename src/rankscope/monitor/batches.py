"""Facts about training batches that show a fault of the data: copies, padding, one token, one class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rankscope.models.inputs import Batch, distinct_in
from rankscope.models.inputs.padding import TRANSFORMERS_MASK
from rankscope.monitor.readings import ENOUGH, Alarm, noted

IGNORED = -100
"""The label that losses leave out."""
LABELS = "labels"
ONE_CLASS = 0.9
"""Share of a batch that one label has, if the batch counts as one of a single class."""
FEATURE = 0.999
"""Share of the squared size of all inputs that one feature has, if it drowns the others."""
CONSTANT = 0.05
"""Standard deviation of that feature relative to its mean."""
LEAST_CLASSED = 4
"""Sequences of a batch that have a class each."""

BatchData = Mapping[str, object] | Tensor | Sequence[object]


class BatchWatch:
    """Reads each batch it is given, and remembers the last one, in constant memory.

    Args:
        padding: the argument that marks padding and the value that does, ``"NAME=VALUE"``; None for
            ``attention_mask``, where 0 marks it.
    """

    def __init__(self, padding: str | None = None) -> None:
        self._padding = padding if padding is not None and "=" in padding else f"{TRANSFORMERS_MASK}=0"
        self._last: Tensor | None = None
        self._different, self._same = 0, 0
        self._of_one_class, self._classes = 0, set[int]()

    def facts(self, given: BatchData, labels: Tensor | None = None) -> dict[str, float]:
        """The facts of a batch by name; those that it has no tensors for are missing.

        Args:
            given: the batch.
            labels: classes that its loss compared with, if they are not in the batch.

        - ``batch_copies``: share of sequences that equal another one of the batch.
        - ``batch_padding``: share of tokens that are padding, or, if nothing marks padding, that are the most common
          token.
        - ``batch_common``: share of the most common token among those that are not padding.
        - ``batch_ignored``: share of labels that a loss leaves out.
        - ``batch_not_finite``: share of the entries that are NaN or infinite, for inputs that are not tokens.
        - ``batch_one_class``: how many batches in a row had sequences of a single class, if not all of the same one.
        - ``batch_feature``: the number of the feature that drowns the others and hardly varies, for inputs that are not
          tokens; -1 if there is none.
        - ``batch_stuck``: how many batches in a row were the same as the one before, after eight that were not.
        """
        named = _named(given)
        found: dict[str, float] = {}
        labels = named.pop(LABELS, labels)
        name, value = _inputs_in(named)
        if labels is not None and labels.numel() and not labels.is_floating_point():
            found["batch_ignored"] = float((labels == IGNORED).double().mean())
            counted = labels.detach().cpu().long()
            counted = counted[counted >= 0]
            is_one_each = labels.ndim == 1 and (value is None or len(labels) == len(value))
            if is_one_each and len(counted) >= LEAST_CLASSED:
                found["batch_one_class"] = self._one_class(torch.bincount(counted).double())
        if value is None:
            return found
        found["batch_stuck"] = self._stuck(value)
        keep = self._keep(named, value)
        if len(value) > 1:
            copies = 1.0 - (distinct_in([Batch({name: value}, keep, 0, len(value))]) - 1) / (len(value) - 1)
            found["batch_copies"] = copies
        if value.is_floating_point():
            found["batch_not_finite"] = float((~torch.isfinite(value)).double().mean())
            if found["batch_not_finite"] > 0.0:
                return found
            if value.ndim == 3 and value.shape[-1] > 1 and bool(value.any()):
                found["batch_feature"] = float(_drowning(value.detach().double().flatten(0, -2)))
            return found
        ids = value.detach().cpu().long()
        counts = torch.bincount(ids.flatten().clamp(min=0)).double()
        found["batch_padding"] = float((counts.max() / counts.sum()) if keep is None else (~keep).double().mean())
        content = ids.flatten() if keep is None else ids[keep]
        if content.numel():
            found["batch_common"] = float(torch.bincount(content.clamp(min=0)).max() / content.numel())
        return found

    def events(self, step: int) -> Iterator[Alarm]:
        """Once, that every batch so far was the same: some runs learn a single batch on purpose."""
        if self._different == 1 and self._same == ENOUGH:
            words = f"the batch was the same at each of the {ENOUGH + 1} readings so far"
            yield noted("same_batch", step, words, "data")

    def _keep(self, named: Mapping[str, Tensor], value: Tensor) -> Tensor | None:
        name, _, marks = self._padding.partition("=")
        mask = named.get(name)
        if mask is None or mask.shape != value.shape:
            return None
        return mask.detach().cpu() != int(marks)

    def _stuck(self, value: Tensor) -> float:
        kept = value.detach()[:4].cpu().clone()  # enough to tell batches apart
        is_same = self._last is not None and kept.shape == self._last.shape and torch.equal(kept, self._last)
        self._last = kept
        self._same = self._same + 1 if is_same else 0
        self._different += not is_same
        return float(self._same if self._different > ENOUGH else 0)

    def _one_class(self, counts: Tensor) -> float:
        if counts.max() < ONE_CLASS * counts.sum():
            self._of_one_class, self._classes = 0, set()
            return 0.0
        self._of_one_class += 1
        self._classes.add(int(counts.argmax()))
        return float(self._of_one_class if len(self._classes) > 1 else 0)


def _drowning(rows: Tensor) -> int:
    """The number of the feature that has nearly all of the size of the inputs and is nearly constant; -1 if none is."""
    sizes = rows.square().sum(0)
    largest = int(sizes.argmax())
    column = rows[:, largest]
    is_constant = float(column.std(correction=0)) <= CONSTANT * abs(float(column.mean()))
    return largest if is_constant and float(sizes[largest]) >= FEATURE * float(sizes.sum()) else -1


def _named(given: BatchData) -> dict[str, Tensor]:
    if isinstance(given, Tensor):
        return {"inputs": given}
    pairs = given.items() if isinstance(given, Mapping) else ((f"argument {n}", v) for n, v in enumerate(given))
    return {str(name): value for name, value in pairs if isinstance(value, Tensor)}


def _inputs_in(named: Mapping[str, Tensor]) -> tuple[str, Tensor | None]:
    """The token ids: ``input_ids``, else the first whole numbers of shape (batch, tokens); else the first tensor."""
    ids = {name: v for name, v in named.items() if v.ndim == 2 and v.dtype in (torch.int64, torch.int32)}
    ids = {name: v for name, v in ids.items() if "mask" not in name and "label" not in name}
    chosen = named.get("input_ids")
    if chosen is not None:
        return "input_ids", chosen
    for name, value in (*ids.items(), *named.items()):
        if value.ndim >= 2 and value.numel():
            return name, value
    return "", None
