"""Facts about training batches that show a fault of the data: copies, padding, other tokens than before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rankscope.models.inputs import Batch, distinct_in
from rankscope.models.inputs.padding import TRANSFORMERS_MASK

IGNORED = -100
"""The label that losses leave out."""
LABELS = "labels"

BatchData = Mapping[str, object] | Tensor | Sequence[object]


class BatchWatch:
    """Reads each batch it is given, and remembers how often each token occurred, in constant memory.

    Args:
        padding: the argument that marks padding and the value that does, ``"NAME=VALUE"``; None for
            ``attention_mask``, where 0 marks it.
    """

    def __init__(self, padding: str | None = None) -> None:
        self._padding = padding if padding is not None and "=" in padding else f"{TRANSFORMERS_MASK}=0"
        self._counts = torch.zeros(0, dtype=torch.float64)

    def facts(self, given: BatchData) -> dict[str, float]:
        """The facts of a batch by name; those that it has no tensors for are missing.

        - ``batch_copies``: share of sequences that equal another one of the batch.
        - ``batch_padding``: share of tokens that are padding, or, if nothing marks padding, that are the most common
          token.
        - ``batch_common``: share of the most common token among those that are not padding.
        - ``batch_surprise``: mean of -log p over the tokens, where p is the frequency of a token in earlier batches
          (with one added to every count); from the second batch on.
        - ``batch_size``: root mean square of the entries, for inputs that are not tokens.
        - ``batch_ignored``: share of labels that a loss leaves out.
        """
        named = _named(given)
        found: dict[str, float] = {}
        labels = named.pop(LABELS, None)
        if labels is not None and labels.numel() and not labels.is_floating_point():
            found["batch_ignored"] = float((labels == IGNORED).double().mean())
        name, value = _inputs_in(named)
        if value is None:
            return found
        keep = self._keep(named, value)
        if len(value) > 1:
            copies = 1.0 - (distinct_in([Batch({name: value}, keep, 0, len(value))]) - 1) / (len(value) - 1)
            found["batch_copies"] = copies
        if value.is_floating_point():
            found["batch_size"] = float(torch.linalg.vector_norm(value.double()) / math.sqrt(value.numel()))
            return found
        ids = value.detach().cpu().long()
        counts = torch.bincount(ids.flatten().clamp(min=0)).double()
        found["batch_padding"] = float((counts.max() / counts.sum()) if keep is None else (~keep).double().mean())
        content = ids.flatten() if keep is None else ids[keep]
        if content.numel():
            found["batch_common"] = float(torch.bincount(content.clamp(min=0)).max() / content.numel())
            found |= self._surprise(torch.bincount(content.clamp(min=0)).double())
        return found

    def _keep(self, named: Mapping[str, Tensor], value: Tensor) -> Tensor | None:
        name, _, marks = self._padding.partition("=")
        mask = named.get(name)
        if mask is None or mask.shape != value.shape:
            return None
        return mask.detach().cpu() != int(marks)

    def _surprise(self, counts: Tensor) -> dict[str, float]:
        size = max(len(counts), len(self._counts))
        seen, now = (torch.nn.functional.pad(one, (0, size - len(one))) for one in (self._counts, counts))
        self._counts = seen + now
        if not seen.sum():
            return {}
        log_p = ((seen + 1.0) / (seen.sum() + size)).log()
        return {"batch_surprise": float(-(now * log_p).sum() / now.sum())}


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
