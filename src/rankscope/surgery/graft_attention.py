"""What grafts do to attention, on scores and probabilities and, the same, on the arguments of a fused kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from rankscope._errors import UnsupportedOperationError
from rankscope.stream.attention_calls import HIDES, AttentionCall
from rankscope.stream.follower import Perform
from rankscope.surgery.attention_edits import UNIFORM, before_kernel, uniform_on
from rankscope.surgery.graft import Graft, Mixture, Number, Spot
from rankscope.surgery.kernels import run_kernel


def score_gain(at: Spot, grafts: Sequence[Graft], seen: Tensor | None, lengths: tuple[int, int]) -> Number:
    """The factor of all grafts on the scores; a row that sees n keys is told so."""
    asked = [graft for graft in grafts if "scores" in graft.touches]
    if not asked:
        return 1.0
    keys = torch.full((1, 1, lengths[0], 1), lengths[1]) if seen is None else seen.sum(dim=-1, keepdim=True)
    product: Number = 1.0
    for graft in asked:
        product = product * graft.score_gain(at, keys)
    return product


def with_gain(call: AttentionCall, gain: Number) -> AttentionCall:
    """A fused call whose scores, a bias in them included, are multiplied by ``gain``."""
    if not isinstance(gain, Tensor) and gain == 1.0:
        return call
    assert call.query is not None
    factor = gain.to(call.query) if isinstance(gain, Tensor) else gain
    call = replace(call, query=call.query * factor)
    if call.mask is None or call.mask.dtype == torch.bool:
        return call
    return replace(call, mask=torch.where(call.mask <= HIDES, call.mask, call.mask.clamp(min=HIDES) * factor))


def gained_scores(scores: Tensor, visible: Tensor, gain: Number) -> Tensor:
    """Scores times ``gain`` where a key is visible."""
    if not isinstance(gain, Tensor) and gain == 1.0:
        return scores
    factor = gain.to(scores) if isinstance(gain, Tensor) else gain
    return (scores.masked_fill(~visible, 0.0) * factor).masked_fill(~visible, -torch.inf)


def joint_mixture(at: Spot, grafts: Sequence[Graft]) -> Mixture | None:
    """The mixtures of all grafts as one; None when no graft mixes."""
    mixtures = [graft.mixture(at) for graft in grafts if "probs" in graft.touches]
    return reduce(lambda earlier, later: later.after(earlier), mixtures) if mixtures else None


def mixed_probs(probs: Tensor, seen: Tensor | None, mixture: Mixture) -> Tensor:
    """The mixture on probabilities ``batch heads query key``."""
    mixed = mixture.own * probs
    if _counts(mixture.uniform):
        mixed = mixed + mixture.uniform * uniform_on(seen, probs)
    if _counts(mixture.identity):
        _check_square(probs.shape[-2], probs.shape[-1])
        mixed = mixed + mixture.identity * torch.eye(probs.shape[-1], dtype=probs.dtype, device=probs.device)
    return mixed


def mixed_output(
    out: Tensor, call: AttentionCall, mixture: Mixture, own: Mapping[str, Any], perform: Perform
) -> Tensor:
    """The same on the output of a fused kernel, ``own`` its arguments. Dropout touches P alone, not I and U."""
    mixed = mixture.own * out
    if _counts(mixture.uniform):
        flat = before_kernel(replace(call, edits=()), call.lengths[0], [UNIFORM])
        mixed = mixed + mixture.uniform * run_kernel(flat, {**own, "dropout_p": 0.0}, perform)
    if _counts(mixture.identity):
        _check_square(*call.lengths)
        assert call.value is not None
        mixed = mixed + mixture.identity * for_each_head(call.value, out.shape[1])
    return mixed


def for_each_head(value: Tensor, heads: int) -> Tensor:
    """Values with one entry per query head, where several heads share a group."""
    return value if value.shape[1] == heads else value.repeat_interleave(heads // value.shape[1], dim=1)


def _counts(number: Number) -> bool:
    return isinstance(number, Tensor) or number != 0.0


def _check_square(queries: int, keys: int) -> None:
    if queries != keys:
        raise UnsupportedOperationError(
            f"An identity in attention pairs each token with itself, and here are {queries} queries and {keys} keys. "
            "Run whole sequences, without cached keys, prefixes or pooled keys."
        )
