"""What surgery does to attention: to its scores before the softmax, and to its probabilities after.

Everything after the softmax is linear in P, so that on a fused kernel, which never shows P, it can be done on its
output: with U the uniform matrix on the visible keys, U V is the same kernel with the query set to zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rankscope._errors import UnsupportedOperationError
from rankscope.stream.attention_calls import AttentionCall
from rankscope.surgery.operation import Operation


def visible_and_bias(call: AttentionCall) -> tuple[Tensor | None, Tensor | None]:
    """The model's own mask, taken apart: which keys are visible, and what is added to visible scores."""
    visible = call.support()
    if call.mask is None or call.mask.dtype == torch.bool:
        return visible, None
    assert visible is not None
    bias = call.mask.masked_fill(~(call.mask > torch.finfo(call.mask.dtype).min / 2), 0.0)
    return visible, bias if bool(bias.any()) else None


def masked(visible: Tensor | None, lengths: tuple[int, int], operation: Operation, device: torch.device) -> Tensor:
    """The new visibility; keys that no query of a sequence sees are padding and stay hidden."""
    assert operation.mask is not None
    pattern = operation.mask.dense(*lengths, device=device)
    if visible is None:
        return torch.ones_like(pattern) if operation.mask_mode == "unite" else pattern
    if operation.mask_mode == "intersect":
        return pattern & visible
    not_padding = visible.any(dim=-2, keepdim=True)
    return (pattern & not_padding) if operation.mask_mode == "replace" else (pattern & not_padding) | visible


def before_kernel(call: AttentionCall, operations: Sequence[Operation]) -> AttentionCall:
    """The arguments of a fused kernel as the operations want them."""
    for operation in operations:
        if operation.mask is not None:
            call = _with_mask(call, operation)
        if operation.temperature != 1.0:
            call = _cooled(call, operation.temperature)
        if operation.attention == "uniform":
            call = _uniform(call)
    return call


def _with_mask(call: AttentionCall, operation: Operation) -> AttentionCall:
    assert call.query is not None
    visible, bias = visible_and_bias(call)
    new = masked(visible, call.lengths, operation, call.query.device)
    if bias is None:
        return replace(call, mask=new, is_causal=False)
    if visible is not None and bool((new & ~visible).any()):
        raise UnsupportedOperationError(
            "This attention adds a position bias to its scores and does not compute it where its own mask hides a key, "
            "so those keys cannot be made visible. Use mask_mode='intersect'."
        )
    return replace(call, mask=bias.masked_fill(~new, -torch.inf), is_causal=False)


def _cooled(call: AttentionCall, temperature: float) -> AttentionCall:
    assert call.query is not None
    own = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
    mask = call.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask / temperature
    return replace(call, scale=own / temperature, mask=mask)


def _uniform(call: AttentionCall) -> AttentionCall:
    assert call.query is not None
    visible, bias = visible_and_bias(call)
    flat = replace(call, query=torch.zeros_like(call.query))
    return flat if bias is None else replace(flat, mask=visible, is_causal=False)


def before_softmax(scores: Tensor, tokens: int, operations: Sequence[Operation]) -> Tensor:
    """Scores as the operations want them; a mask is already inside them."""
    hidden = scores <= torch.finfo(scores.dtype).min / 2
    for operation in operations:
        if operation.mask is not None:
            scores = _masked_scores(scores, hidden, tokens, operation)
        if operation.temperature != 1.0:
            scores = scores / operation.temperature
        if operation.attention == "uniform":
            _refuse_sink(scores, tokens)
            scores = torch.zeros_like(scores).masked_fill(scores <= torch.finfo(scores.dtype).min / 2, -torch.inf)
    return scores


def _masked_scores(scores: Tensor, hidden: Tensor, tokens: int, operation: Operation) -> Tensor:
    lengths = (scores.shape[-2], scores.shape[-1] - (scores.shape[-1] == tokens + 1))
    own = ~hidden[..., : lengths[1]]
    new = masked(own, lengths, operation, scores.device).expand(own.shape)
    if bool((new & ~own).any()):
        raise UnsupportedOperationError(
            "This attention has its own mask inside its scores before surgery can see them, so keys it hides cannot be "
            "made visible. Use mask_mode='intersect', or run the model with attn_implementation='sdpa' if it can."
        )
    padding = (0, scores.shape[-1] - lengths[1])
    return scores.masked_fill(~torch.nn.functional.pad(new, padding, value=True), -torch.inf)


def _refuse_sink(scores: Tensor, tokens: int) -> None:
    if scores.shape[-1] == tokens + 1:
        raise UnsupportedOperationError(
            "This attention has a learned sink beside its keys: uniform has no meaning there."
        )


def uniform_on(support: Tensor | None, like: Tensor) -> Tensor:
    """Equal weight on every visible key of a row."""
    if support is None:
        return torch.full_like(like, 1.0 / like.shape[-1])
    seen = support.expand(like.shape).to(like.dtype)
    return seen / seen.sum(dim=-1, keepdim=True)


def edit_probs(probs: Tensor, support: Tensor | None, operation: Operation) -> Tensor:
    """P after centring, scaling and removal of heads."""
    if operation.attention == "centred" or operation.attention_scale != 1.0:
        uniform = uniform_on(support, probs)
        kept = torch.zeros_like(uniform) if operation.attention == "centred" else uniform
        probs = kept + operation.attention_scale * (probs - uniform)
    return probs * head_gains(operation, probs) if operation.heads else probs


def head_gains(operation: Operation, like: Tensor) -> Tensor:
    """One factor per head, zero for those that are removed."""
    beyond = sorted(head for head in operation.heads if head not in range(like.shape[1]))
    if beyond:
        raise UnsupportedOperationError(f"heads={beyond}: the block has heads 0 to {like.shape[1] - 1}.")
    gains = torch.ones(like.shape[1], dtype=like.dtype, device=like.device)
    gains[sorted(operation.heads)] = 0.0
    return gains[:, None, None]


def edits_probs(operation: Operation) -> bool:
    """Whether anything happens after the softmax."""
    return operation.attention == "centred" or operation.attention_scale != 1.0 or bool(operation.heads)
