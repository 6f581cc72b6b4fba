"""What surgery does to attention: to its scores before the softmax, and to its probabilities after.

Everything after the softmax is linear in P, so that on a fused kernel, which never shows P, it can be done on its
output: with U the uniform matrix on the visible keys, U V is the same kernel with the query set to zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope._errors import UnsupportedOperationError
from rankscope.stream.attention_calls import HIDES, AttentionCall
from rankscope.surgery.operation import Operation
from rankscope.surgery.visibility import after_masks, visible_scores

UNIFORM = Operation(attention="uniform")


def before_kernel(call: AttentionCall, tokens: int, operations: Sequence[Operation]) -> AttentionCall:
    """The arguments of a fused kernel as the operations want them."""
    assert call.query is not None
    own, bias = _own_visibility(call)
    visible = after_masks(own, call.lengths, tokens, operations, call.query.device)
    flat = any(operation.attention == "uniform" for operation in operations)
    if bias is not None and not flat:
        _refuse_revealing(own, visible, "It adds a position bias, and none where its own mask hides a key.")
    if flat:
        call, bias = replace(call, query=torch.zeros_like(call.query)), None
    call = _cooled(call, bias, operations)
    if bias is None and visible is own:
        return call if call.mask is None or call.mask.dtype == torch.bool else replace(call, mask=own, is_causal=False)
    if bias is None or visible is None:
        return replace(call, mask=visible, is_causal=False)
    assert call.mask is not None
    return replace(call, mask=call.mask.masked_fill(~visible, -torch.inf), is_causal=False)


def _own_visibility(call: AttentionCall) -> tuple[Tensor | None, Tensor | None]:
    """The model's own mask, taken apart: which keys are visible, and what is added to visible scores."""
    visible = call.support()
    if call.mask is None or call.mask.dtype == torch.bool:
        return visible, None
    bias = call.mask.masked_fill(call.mask <= HIDES, 0.0)
    return visible, bias if bias.requires_grad or bool(bias.any()) else None


def _cooled(call: AttentionCall, bias: Tensor | None, operations: Sequence[Operation]) -> AttentionCall:
    """Scores, a bias in them included, divided by the temperature; hidden keys stay hidden."""
    temperature = _temperature(operations)
    assert call.query is not None
    if temperature != 1.0:
        own = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
        call = replace(call, scale=own / temperature)
    return call if bias is None else replace(call, mask=bias / temperature)


def before_softmax(scores: Tensor, tokens: int, operations: Sequence[Operation], sinks: int) -> tuple[Tensor, Tensor]:
    """Scores and visibility as the operations want them.

    Args:
        scores: with the model's own mask inside, ``batch heads query key``.
        tokens: number of tokens in the stream.
        operations: in their order.
        sinks: columns at the end that are no keys.
    """
    lengths = scores.shape[-2], scores.shape[-1] - sinks
    own = visible_scores(scores)[..., : lengths[1]]
    visible = after_masks(own, lengths, tokens, operations, scores.device)
    assert visible is not None
    visible = visible.expand(own.shape)
    if any(operation.attention == "uniform" for operation in operations):
        scores = torch.zeros_like(scores)
    else:
        _refuse_revealing(own, visible, "Its own mask is already inside its scores where surgery meets them.")
        scores = scores / _temperature(operations)
    visible = F.pad(visible, (0, sinks), value=True)
    return scores.masked_fill(~visible, -torch.inf), visible


def _temperature(operations: Sequence[Operation]) -> float:
    product = 1.0
    for operation in operations:
        product *= operation.temperature
    return product


def _refuse_revealing(own: Tensor | None, visible: Tensor | None, why: str) -> None:
    if own is None or visible is own or (visible is not None and not bool((visible & ~own).any())):
        return
    raise UnsupportedOperationError(
        f"A key that this attention hides cannot be made visible. {why} Use mask_mode='intersect', or, if the "
        "attention has no bias, load the model with attn_implementation='sdpa'."
    )


def edit_probs(probs: Tensor, support: Tensor | None, operation: Operation) -> Tensor:
    """P after centring, scaling and removal of heads."""
    if operation.attention == "centred" or operation.attention_scale != 1.0:
        probs = _recentred(probs, uniform_on(support, probs), operation)
    return probs * head_gains(operation, probs) if operation.heads else probs


def edit_output(out: Tensor, uniform: Tensor | None, operation: Operation) -> Tensor:
    """The edits of :func:`edit_probs`, carried over from P to P V; ``uniform`` is U V where it is needed."""
    if uniform is not None:
        out = _recentred(out, uniform, operation)
    return out * head_gains(operation, out) if operation.heads else out


def _recentred(own: Tensor, uniform: Tensor, operation: Operation) -> Tensor:
    scaled = operation.attention_scale * (own - uniform)
    return scaled if operation.attention == "centred" else uniform + scaled


def uniform_on(support: Tensor | None, like: Tensor) -> Tensor:
    """Equal weight on every visible key of a row; zero in a row that sees none."""
    if support is None:
        return torch.full_like(like, 1.0 / like.shape[-1])
    seen = support.expand(like.shape).to(like.dtype)
    return seen / seen.sum(dim=-1, keepdim=True).clamp(min=1.0)


def head_gains(operation: Operation, like: Tensor) -> Tensor:
    """One factor per head, zero for those that are removed."""
    beyond = sorted(head for head in operation.heads if head not in range(like.shape[1]))
    if beyond:
        raise UnsupportedOperationError(f"heads={beyond}: the block has heads 0 to {like.shape[1] - 1}.")
    gains = torch.ones(like.shape[1], dtype=like.dtype, device=like.device)
    gains[sorted(operation.heads)] = 0.0
    return gains[:, None, None]


def needs_uniform(operation: Operation) -> bool:
    """Whether the uniform matrix enters after the softmax."""
    return operation.attention == "centred" or operation.attention_scale != 1.0


def edits_probs(operation: Operation) -> bool:
    """Whether anything happens after the softmax."""
    return needs_uniform(operation) or bool(operation.heads)
