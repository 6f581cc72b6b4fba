"""Which keys a query sees under surgery."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from rankscope._errors import UnsupportedOperationError
from rankscope.masks import Mask
from rankscope.stream.attention_calls import HIDES
from rankscope.surgery.operation import Operation


def visible_scores(scores: Tensor) -> Tensor:
    """Which keys the model's own mask leaves visible, told from scores that already hold it.

    A key counts as hidden when its score lies more than 5,000 below the largest of its head. Heuristic; false only for
    scores that differ by as much without a mask.
    """
    scores = scores.detach()
    return scores > scores.amax(dim=(-2, -1), keepdim=True) + HIDES


def after_masks(
    visible: Tensor | None, lengths: tuple[int, int], tokens: int, operations: Sequence[Operation], device: torch.device
) -> Tensor | None:
    """The visibility that the operations leave, one after the other; None when every key is visible.

    Args:
        visible: the model's own.
        lengths: number of queries and of keys.
        tokens: number of tokens in the stream.
        operations: in their order; those without a mask change nothing.
        device: of the result.

    Raises:
        UnsupportedOperationError: this attention does not run among the tokens of the stream.
    """
    for operation in operations:
        if operation.mask is not None:
            _check_lengths(lengths, tokens, operation.mask)
            visible = _masked(visible, pattern(operation.mask, *lengths, device), operation)
    return visible


def _masked(visible: Tensor | None, new: Tensor, operation: Operation) -> Tensor:
    """One mask more; keys that no query of a sequence sees are padding and stay hidden."""
    if visible is None:
        return torch.ones_like(new) if operation.mask_mode == "unite" else new
    if operation.mask_mode == "intersect":
        return new & visible
    not_padding = visible.any(dim=-2, keepdim=True)
    return (new & not_padding) if operation.mask_mode == "replace" else (new & not_padding) | visible


@lru_cache(maxsize=8)
def pattern(mask: Mask, query: int, key: int, device: torch.device) -> Tensor:
    """The dense mask, kept for the next layer."""
    with torch.inference_mode(False):
        return mask.dense(query, key, device=device)


def _check_lengths(lengths: tuple[int, int], tokens: int, mask: Mask) -> None:
    if lengths[0] != tokens or lengths[1] < tokens:
        raise UnsupportedOperationError(
            f"mask='{mask}' says which of {tokens} tokens see each other, and this attention runs among others: "
            f"{lengths[0]} queries and {lengths[1]} keys (windows, pooled keys or several streams). "
            "It cannot be masked; its temperature, uniform attention and heads can be changed."
        )
