"""Running a fused attention kernel with other arguments than the model gave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.follower import Perform
from rankscope.surgery.attention_edits import UNIFORM, before_kernel, edit_output, needs_uniform
from rankscope.surgery.operation import Operation


def run_edited(call: AttentionCall, own: Mapping[str, Any], perform: Perform, after: Operation) -> Tensor:
    """The kernel's output for ``call``, edited as if its probabilities had been.

    Args:
        call: query, key, value, mask and scale.
        own: the model's own arguments; dropout and grouping of heads are taken from them.
        perform: the kernel.
        after: what happens after the softmax.
    """
    if not needs_uniform(after):
        return edit_output(run_kernel(call, own, perform), None, after)
    dropout = own.get("dropout_p", 0.0) > 0
    # Other kinds of tensors, such as those of exact arithmetic, know the kernel and not what stands in for it.
    if not dropout and call.mask is None and not call.is_causal and type(call.value) is Tensor:
        out = run_kernel(call, own, perform)
        return edit_output(out, _mean_of_values(call, out), after)
    flat = before_kernel(replace(call, edits=()), call.lengths[0], [UNIFORM])
    state = _random_state(call) if dropout else None
    out = run_kernel(call, own, perform)
    if state is not None:
        _set_random_state(call, state)  # P and U lose the same entries, as P - U would
    return edit_output(out, run_kernel(flat, own, perform), after)


def _mean_of_values(call: AttentionCall, out: Tensor) -> Tensor:
    """What uniform attention gives where every key is visible: the same for all queries, without a second kernel."""
    assert call.value is not None
    mean = call.value.mean(dim=-2, keepdim=True)
    return mean.repeat_interleave(out.shape[-3] // mean.shape[-3], dim=-3).expand_as(out)


def run_kernel(call: AttentionCall, own: Mapping[str, Any], perform: Perform) -> Tensor:
    """The kernel on ``call``; dropout and grouping of heads as in the model's own arguments."""
    kept = {name: own[name] for name in ("dropout_p", "enable_gqa") if name in own}
    options = {"attn_mask": call.mask, "is_causal": call.is_causal, "scale": call.scale} | kept
    out: Tensor = perform(call.query, call.key, call.value, **options)
    return out


def _random_state(call: AttentionCall) -> Tensor:
    assert call.query is not None
    device = call.query.device
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(call: AttentionCall, state: Tensor) -> None:
    assert call.query is not None
    device = call.query.device
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)
