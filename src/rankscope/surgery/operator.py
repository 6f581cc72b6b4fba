"""The hand that operates: rewrites skip adds, norms and attention of a running model, and touches no weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.models.view import Label, ModelView
from rankscope.stream.attention_calls import AttentionCall, announce, from_sdpa
from rankscope.stream.follower import Perform, StreamFollower
from rankscope.stream.frames import output_tensor
from rankscope.stream.open_call import OpenCall
from rankscope.stream.operators import is_attention, is_norm
from rankscope.stream.sites import SiteRef
from rankscope.surgery.attention_edits import (
    before_kernel,
    before_softmax,
    edit_probs,
    edits_probs,
    head_gains,
)
from rankscope.surgery.norm_edits import normed
from rankscope.surgery.operation import NormChoice, Operation


class Operator(StreamFollower):
    """Follows the stream and changes it as the operations say, in their order.

    Args:
        view: the model and its structure.
        operations: what is done now; the list may grow and shrink while the operator rides.
    """

    def __init__(self, view: ModelView, operations: Sequence[Operation]) -> None:
        super().__init__(view, reads_attention=any(operation.touches_attention for operation in operations))
        self._operations = operations

    def opens_outside_a_pass(self) -> bool:
        """Gradient checkpointing runs blocks again, and they must be cut again."""
        return True

    def _for(self, stack: str | None, layer: int) -> list[Operation]:
        return [operation for operation in self._operations if operation.applies_to(stack, layer)]

    def on_add(self, call: OpenCall, label: Label | None, stream: Tensor, branch: Tensor, perform: Perform) -> Tensor:
        """Put the gain on the skip, or leave the MLP out."""
        operations = self._for(call.stack.name, call.layer) if label is not None else []
        if label is None or not operations:
            return super().on_add(call, label, stream, branch, perform)
        gain = prod(operation.gain(label) for operation in operations)
        if label == "mlp" and any(operation.mlp == "drop" for operation in operations):
            return stream.clone() if gain in (0.0, 1.0) else gain * stream
        if gain == 1.0:
            return super().on_add(call, label, stream, branch, perform)
        return branch.clone() if gain == 0.0 else gain * stream + branch

    def on_norm(self, call: OpenCall, x: Tensor, out: Tensor) -> Tensor:
        """Replace a norm of the stream."""
        return normed(x, out, self._norm_choice(call))

    def _norm_choice(self, call: OpenCall) -> NormChoice:
        chosen = [operation.norm for operation in self._for(call.stack.name, call.layer) if operation.norm != "keep"]
        return chosen[-1] if chosen else "keep"

    def on_fused(self, ref: SiteRef, args: Sequence[Any], kwargs: Mapping[str, Any], perform: Perform) -> Any:
        """Run the fused kernel on other arguments, and correct its output."""
        operations = [operation for operation in self._for(ref.stack, ref.layer) if operation.touches_attention]
        own = from_sdpa(args, kwargs)
        if not operations or own is None:
            return perform(*args, **kwargs)
        call = before_kernel(own, operations)
        after = [operation for operation in operations if edits_probs(operation)]
        kernel = partial(_run_kernel, perform, kwargs)
        out = kernel(call)
        for operation in after:
            out = _edit_output(out, call, operation, kernel)
        announce(replace(call, edits=tuple(partial(edit_probs, operation=operation) for operation in after)))
        return out

    def on_softmax(self, ref: SiteRef, args: Sequence[Any], kwargs: Mapping[str, Any], perform: Perform) -> Any:
        """Change scores before the softmax and probabilities after it."""
        operations = [operation for operation in self._for(ref.stack, ref.layer) if operation.touches_attention]
        if not operations:
            return perform(*args, **kwargs)
        assert self._open is not None
        tokens = self._open.batch_and_tokens()[1]
        scores = before_softmax(args[0], tokens, operations)
        probs = perform(scores, *args[1:], **kwargs)
        for operation in operations:
            if edits_probs(operation):
                probs = edit_probs(probs, probs > 0, operation)
        return probs

    def _inner_hooks(self, block: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        yield from super()._inner_hooks(block)
        inside_attention = {
            id(inner)
            for name, module in block.named_modules()
            if is_attention(name, module)
            for inner in module.modules()
        }
        for module in block.modules():
            if is_norm(module) and id(module) not in inside_attention:
                yield module.register_forward_hook(self._branch_norm)

    def _branch_norm(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """A norm on a branch (sandwich norms); norms of the stream are dealt with where they are met."""
        call, out = self._open, output_tensor(output)
        if call is None or out is None or not args or call.is_stream(args[0]) or out.shape[-1] != call.entry_shape[-1]:
            return None
        new = normed(args[0], out, self._norm_choice(call))
        return new if new is not out and isinstance(output, Tensor) else None

    def _hooks(self, modules: Mapping[str, nn.Module]) -> Iterator[torch.utils.hooks.RemovableHandle]:
        yield from super()._hooks(modules)
        for stack in self.view.stacks:
            for layer, plan in enumerate(stack.plans):
                if plan.parallel_mlp is not None:
                    yield modules[plan.parallel_mlp].register_forward_hook(self._parallel_mlp(stack.name, layer))

    def _parallel_mlp(self, stack: str | None, layer: int) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            dropped = any(operation.mlp == "drop" for operation in self._for(stack, layer))
            return torch.zeros_like(output) if dropped and isinstance(output, Tensor) else None

        return hook


def _run_kernel(perform: Perform, kwargs: Mapping[str, Any], call: AttentionCall) -> Tensor:
    kept = {name: kwargs[name] for name in ("dropout_p", "enable_gqa") if name in kwargs}
    options = {"attn_mask": call.mask, "is_causal": call.is_causal, "scale": call.scale} | kept
    out: Tensor = perform(call.query, call.key, call.value, **options)
    return out


def _edit_output(
    out: Tensor, call: AttentionCall, operation: Operation, kernel: Callable[[AttentionCall], Tensor]
) -> Tensor:
    """The edits of :func:`edit_probs`, carried over from P to P V."""
    if operation.attention == "centred" or operation.attention_scale != 1.0:
        uniform = kernel(before_kernel(call, [Operation(attention="uniform")]))
        kept = torch.zeros_like(uniform) if operation.attention == "centred" else uniform
        out = kept + operation.attention_scale * (out - uniform)
    return out * head_gains(operation, out) if operation.heads else out
