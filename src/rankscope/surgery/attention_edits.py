"""Surgery on attention: edits its scores before the softmax and its probabilities after it.

Everything after the softmax is linear in P. So on a fused kernel, which never exposes P, the edit is applied to its
output: with U the uniform matrix on the visible keys, U V is the same kernel with the query set to zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.errors import UnsupportedOperationError
from rankscope.masks import Mask
from rankscope.models.loading.devices import random_state, set_random_state
from rankscope.stream.attention_calls import HIDES, AttentionCall
from rankscope.stream.mode import Perform
from rankscope.surgery.graft import Graft, Mixture, Number, ScoreMap, Spot
from rankscope.surgery.operation import Operation


def visible_scores(scores: Tensor) -> Tensor:
    """Which keys the model's own mask leaves visible, inferred from scores that already include it.

    A key counts as hidden if its score is more than 5,000 below the largest of its head. Heuristic; wrong only for
    scores that differ by that much without a mask.
    """
    scores = scores.detach()
    return scores > scores.amax(dim=(-2, -1), keepdim=True) + HIDES


def after_masks(
    visible: Tensor | None, lengths: tuple[int, int], tokens: int, operations: Sequence[Operation], device: torch.device
) -> Tensor | None:
    """The keys that are visible after all operations, applied in order; None if every key is visible.

    Args:
        visible: the model's own visibility.
        lengths: number of queries and of keys.
        tokens: number of tokens in the stream.
        operations: in order; those without a mask change nothing.
        device: device of the result.

    Raises:
        UnsupportedOperationError: this attention is not between the tokens of the stream.
    """
    for operation in operations:
        if operation.mask is not None:
            _check_lengths(lengths, tokens, operation.mask)
            visible = _masked(visible, pattern(operation.mask, *lengths, device), operation)
    return visible


def _masked(visible: Tensor | None, new: Tensor, operation: Operation) -> Tensor:
    """Apply one more mask; keys that no query of a sequence sees are padding and stay hidden."""
    if visible is None:
        return torch.ones_like(new) if operation.mask_mode == "unite" else new
    if operation.mask_mode == "intersect":
        return new & visible
    # Replacing or widening the mask must not reveal padding to the model.
    not_padding = visible.any(dim=-2, keepdim=True)
    return (new & not_padding) if operation.mask_mode == "replace" else (new & not_padding) | visible


@lru_cache(maxsize=8)
def pattern(mask: Mask, query: int, key: int, device: torch.device) -> Tensor:
    """The dense mask, cached for the next layer."""
    with torch.inference_mode(False):
        return mask.dense(query, key, device=device)


def _check_lengths(lengths: tuple[int, int], tokens: int, mask: Mask) -> None:
    if lengths[0] != tokens or lengths[1] < tokens:
        raise UnsupportedOperationError(
            f"mask='{mask}' says which of {tokens} tokens see each other, and this attention runs among others: "
            f"{lengths[0]} queries and {lengths[1]} keys (windows, pooled keys or several streams). "
            "It cannot be masked; its temperature, uniform attention and heads can be changed."
        )


UNIFORM = Operation(attention="uniform")


def before_kernel(call: AttentionCall, tokens: int, operations: Sequence[Operation]) -> AttentionCall:
    """The arguments of a fused kernel after the operations."""
    assert call.query is not None
    own, bias = _own_visibility(call)
    visible = after_masks(own, call.lengths, tokens, operations, call.query.device)
    flat = any(operation.attention == "uniform" for operation in operations)
    if bias is not None and not flat:
        _refuse_revealing(own, visible, "It adds a position bias, and none where its own mask hides a key.")
    # A zero query makes all scores equal, so the kernel itself computes uniform attention over the visible keys.
    if flat:
        call, bias = replace(call, query=torch.zeros_like(call.query)), None
    call = _cooled(call, bias, operations)
    # The mask did not change. An additive mask that only hides keys becomes boolean, so that it hides them exactly.
    if bias is None and visible is own:
        return call if call.mask is None or call.mask.dtype == torch.bool else replace(call, mask=own, is_causal=False)
    if bias is None or visible is None:
        return replace(call, mask=visible, is_causal=False)
    assert call.mask is not None
    return replace(call, mask=call.mask.masked_fill(~visible, -torch.inf), is_causal=False)


def _own_visibility(call: AttentionCall) -> tuple[Tensor | None, Tensor | None]:
    """The model's own mask, split into which keys are visible and what is added to visible scores."""
    visible = call.support()
    if call.mask is None or call.mask.dtype == torch.bool:
        return visible, None
    bias = call.mask.masked_fill(call.mask <= HIDES, 0.0)
    return visible, bias if bias.requires_grad or bool(bias.any()) else None


def _cooled(call: AttentionCall, bias: Tensor | None, operations: Sequence[Operation]) -> AttentionCall:
    """Scores, including a bias, divided by the temperature; hidden keys stay hidden."""
    temperature = math.prod(operation.temperature for operation in operations)
    assert call.query is not None
    # Dividing the scale divides query times key; a bias is added afterwards and has to be divided separately.
    if temperature != 1.0:
        own = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
        call = replace(call, scale=own / temperature)
    return call if bias is None else replace(call, mask=bias / temperature)


def before_softmax(scores: Tensor, tokens: int, operations: Sequence[Operation], sinks: int) -> tuple[Tensor, Tensor]:
    """Scores and visibility after the operations.

    Args:
        scores: including the model's own mask, ``batch heads query key``.
        tokens: number of tokens in the stream.
        operations: in order.
        sinks: number of columns at the end that are not keys.
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
        scores = scores / math.prod(operation.temperature for operation in operations)
    visible = F.pad(visible, (0, sinks), value=True)
    return scores.masked_fill(~visible, -torch.inf), visible


def _refuse_revealing(own: Tensor | None, visible: Tensor | None, why: str) -> None:
    if own is None or visible is own or (visible is not None and not bool((visible & ~own).any())):
        return
    raise UnsupportedOperationError(
        f"A key that this attention hides cannot be made visible. {why} Use mask_mode='intersect', or, if the "
        "attention has no bias, load the model with attn_implementation='sdpa'."
    )


def mapped_scores(own: AttentionCall, call: AttentionCall, at: Spot, grafts: Sequence[Graft]) -> AttentionCall:
    """A fused call with the queries, keys and scale of every graft that changes them, in order.

    Args:
        own: the model's own call.
        call: the call after the operations.
        at: the block.
        grafts: those that change them.
    """
    if not grafts:
        return call
    assert own.query is not None
    assert call.query is not None
    assert call.key is not None
    scale = own.query.shape[-1] ** -0.5 if own.scale is None else own.scale
    # A graft may replace the model's own scale; a temperature, which operations put there too, must survive that.
    cooled = 1.0 if call.scale == own.scale else (call.scale or scale) / scale
    scores = ScoreMap(call.query, call.key, scale)
    for graft in grafts:
        scores = graft.scores(at, scores)
    return replace(call, query=scores.query, key=scores.key, scale=scores.scale * cooled)


def joint_mixture(operations: Sequence[Operation], grafts: Sequence[Mixture], like: Tensor) -> Mixture | None:
    """What becomes of P after the softmax: the operations first, then the grafts; None if nothing does.

    The scales of several operations multiply, and one centring is enough. A scale s of AttnScale makes of P
    ``U + s (P - U)``, and of centred attention ``s (P - U)``.

    Args:
        operations: on this attention.
        grafts: their mixtures, in order.
        like: a tensor ``batch heads ...``.
    """
    steps = [*grafts]
    removed = frozenset[int]().union(*(operation.heads for operation in operations))
    if removed:
        heads = range(like.shape[1])
        beyond = sorted(removed.difference(heads))
        if beyond:
            raise UnsupportedOperationError(f"heads={beyond}: the block has heads 0 to {heads[-1]}.")
        kept = [float(head not in removed) for head in heads]
        steps.insert(0, Mixture(own=torch.tensor(kept, dtype=like.dtype, device=like.device)[:, None, None]))
    scale = math.prod(operation.attention_scale for operation in operations)
    if any(operation.attention == "centred" for operation in operations):
        steps.insert(0, Mixture(own=scale, uniform=-scale))
    elif scale != 1.0:
        steps.insert(0, Mixture(own=scale, uniform=1.0 - scale))
    return reduce(lambda earlier, later: later.after(earlier), steps) if steps else None


def mixed_probs(probs: Tensor, support: Tensor | None, mixture: Mixture) -> Tensor:
    """The mixture applied to probabilities ``batch heads query key``."""
    mixed = _times(mixture.own, probs)
    if _counts(mixture.uniform):
        mixed = mixed + _times(mixture.uniform, uniform_on(support, probs))
    if _counts(mixture.identity):
        _check_square(probs.shape[-2], probs.shape[-1])
        mixed = mixed + _times(mixture.identity, torch.eye(probs.shape[-1], dtype=probs.dtype, device=probs.device))
    return mixed


def run_mixed(call: AttentionCall, own: Mapping[str, Any], perform: Perform, mixture: Mixture | None) -> Tensor:
    """The kernel's output for ``call``, as if the mixture had been made of its probabilities.

    Dropout loses the same entries of P and of the uniform matrix, as it does in the mixture, and none of the identity.

    Args:
        call: query, key, value, mask and scale.
        own: the model's own arguments, used for dropout and grouping of heads.
        perform: the kernel.
        mixture: what to make of P; None for P itself.
    """
    assert call.value is not None
    device, has_uniform = call.value.device, mixture is not None and _counts(mixture.uniform)
    state = random_state(device) if has_uniform and own.get("dropout_p", 0.0) > 0 else None
    out = run_kernel(call, own, perform)
    if mixture is None:
        return out
    mixed = _times(mixture.own, out)
    if has_uniform:
        if state is not None:
            set_random_state(device, state)
        mixed = mixed + _times(mixture.uniform, _uniform_output(call, own, perform, out, drops=state is not None))
    if _counts(mixture.identity):
        _check_square(*call.lengths)
        mixed = mixed + _times(mixture.identity, for_each_head(call.value, out.shape[1]))
    return mixed


def _uniform_output(
    call: AttentionCall, own: Mapping[str, Any], perform: Perform, out: Tensor, *, drops: bool
) -> Tensor:
    """``U V``; ``out`` is the output for P, whose shape it has."""
    assert call.value is not None
    # If every key is visible it is the same for all queries, and needs no second kernel. Other tensor types, such as
    # those of exact arithmetic, support the kernel but not its replacement.
    if not drops and call.mask is None and not call.is_causal and type(call.value) is Tensor:
        return for_each_head(call.value.mean(dim=-2, keepdim=True), out.shape[-3]).expand_as(out)
    return run_kernel(before_kernel(replace(call, edit=None), call.lengths[0], [UNIFORM]), own, perform)


def for_each_head(value: Tensor, heads: int) -> Tensor:
    """Values with one entry per query head, if several heads share a group."""
    return value if value.shape[1] == heads else value.repeat_interleave(heads // value.shape[1], dim=1)


def _times(number: Number, x: Tensor) -> Tensor:
    if isinstance(number, Tensor):
        return x * number.to(x.dtype).to(x.device)
    return x if number == 1.0 else x * number


def _counts(number: Number) -> bool:
    return isinstance(number, Tensor) or number != 0.0


def _check_square(queries: int, keys: int) -> None:
    if queries != keys:
        raise UnsupportedOperationError(
            f"An identity in attention pairs each token with itself, and here are {queries} queries and {keys} keys. "
            "Run whole sequences, without cached keys, prefixes or pooled keys."
        )


def uniform_on(support: Tensor | None, like: Tensor) -> Tensor:
    """Equal weight on every visible key of a row; zero in a row that sees none."""
    if support is None:
        return torch.full_like(like, 1.0 / like.shape[-1])
    seen = support.expand(like.shape).to(like.dtype)
    return seen / seen.sum(dim=-1, keepdim=True).clamp(min=1.0)


def run_kernel(call: AttentionCall, own: Mapping[str, Any], perform: Perform) -> Tensor:
    """Run the kernel on ``call``, with dropout and grouping of heads from the model's own arguments."""
    kept = {name: own[name] for name in ("dropout_p", "enable_gqa") if name in own}
    options = {"attn_mask": call.mask, "is_causal": call.is_causal, "scale": call.scale} | kept
    out: Tensor = perform(call.query, call.key, call.value, **options)
    return out
