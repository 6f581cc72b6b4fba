"""The hand that operates: rewrites skip adds, norms and attention of a running model, and touches no weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from rankscope._errors import UnsupportedOperationError
from rankscope.models.view import Label, ModelView
from rankscope.stream.attention_calls import announce, from_sdpa, sdpa_arguments
from rankscope.stream.follower import Perform, StreamFollower
from rankscope.stream.frames import output_tensor, with_output_tensor
from rankscope.stream.open_call import OpenCall
from rankscope.stream.operators import is_attention, is_norm
from rankscope.stream.recomputation import in_backward
from rankscope.stream.sites import SiteRef
from rankscope.surgery.attention_edits import before_kernel, before_softmax, edit_probs, edits_probs, needs_uniform
from rankscope.surgery.kernels import run_edited
from rankscope.surgery.norm_edits import normed
from rankscope.surgery.operation import NormChoice, Operation, joint_edit


class Operator(StreamFollower):
    """Follows the stream and changes it as the operations say, in their order.

    Args:
        view: the model and its structure.
        operations: what is done now; the list may grow and shrink while the operator rides.
    """

    def __init__(self, view: ModelView, operations: Sequence[Operation]) -> None:
        super().__init__(view)
        self._operations = operations

    def reads_attention(self) -> bool:
        """Only while an operation changes attention."""
        return any(operation.touches_attention for operation in self._operations)

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
        gain = 1.0 if call.joins else prod(operation.gain(label) for operation in operations)
        if label == "mlp" and any(operation.mlp == "drop" for operation in operations):
            keeps_stream = gain == 1.0 or (gain == 0.0 and not call.is_joined)
            return stream.clone() if keeps_stream else gain * stream
        if gain == 1.0:
            return super().on_add(call, label, stream, branch, perform)
        return branch.clone() if gain == 0.0 else gain * stream + branch

    def on_norm(self, call: OpenCall, x: Tensor, out: Tensor) -> Tensor:
        """Replace a norm of the stream."""
        return normed(x, out, self._norm_choice(call))

    def _norm_choice(self, call: OpenCall) -> NormChoice:
        if call.is_at_final_norm:
            return "keep"
        chosen = [operation.norm for operation in self._for(call.stack.name, call.layer) if operation.norm != "keep"]
        return chosen[-1] if chosen else "keep"

    def _on_attention(self, ref: SiteRef) -> list[Operation]:
        """What changes this attention; a mask, which is about tokens of one stream, leaves cross-attention alone."""
        operations = self._for(ref.stack, ref.layer)
        if ref.site == "cross_attention.probs":
            operations = [replace(operation, mask=None) for operation in operations]
        return [operation for operation in operations if operation.touches_attention]

    def _tokens(self) -> int:
        assert self._open is not None
        return self._open.batch_and_tokens()[1]

    def on_fused(self, ref: SiteRef, args: Sequence[Any], kwargs: Mapping[str, Any], perform: Perform) -> Any:
        """Run the fused kernel on other arguments, and correct its output."""
        operations, own = self._on_attention(ref), from_sdpa(args, kwargs)
        if not operations or own is None:
            return perform(*args, **kwargs)
        call = before_kernel(own, self._tokens(), operations)
        after = joint_edit(operations)
        if edits_probs(after):
            call = replace(call, edits=(partial(edit_probs, operation=after),))
        out = run_edited(call, sdpa_arguments(args, kwargs), perform, after)
        announce(call)
        return out

    def on_softmax(self, ref: SiteRef, args: Sequence[Any], kwargs: Mapping[str, Any], perform: Perform) -> Any:
        """Change scores before the softmax and probabilities after it."""
        operations = self._on_attention(ref)
        if not operations:
            return perform(*args, **kwargs)
        tokens, after = self._tokens(), joint_edit(operations)
        sinks = int(ref.site == "attention.probs" and args[0].shape[-1] == tokens + 1)
        if sinks and (needs_uniform(after) or any(operation.attention == "uniform" for operation in operations)):
            raise UnsupportedOperationError(
                f"{ref}: a learned sink stands beside its keys: uniform has no meaning there."
            )
        scores, visible = before_softmax(args[0], tokens, operations, sinks)
        sees_nothing = ~visible.any(dim=-1, keepdim=True)
        probs = perform(scores.masked_fill(sees_nothing, 0.0), *args[1:], **kwargs).masked_fill(sees_nothing, 0.0)
        return edit_probs(probs, visible, after)

    def _inner_hooks(self, block: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        yield from super()._inner_hooks(block)
        inside_attention = {
            id(inner)
            for name, module in block.named_modules()
            if is_attention(name, module)
            for inner in module.modules()
        }
        for module in block.modules():
            if module is not block:
                yield module.register_forward_pre_hook(self._refuse_parts)
            if is_norm(module) and id(module) not in inside_attention:
                yield module.register_forward_hook(self._branch_norm)

    def _refuse_parts(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._open is None and in_backward():
            raise UnsupportedOperationError(
                f"Gradient checkpointing runs {type(module).__name__}, a part of a block, again by itself in the "
                "backward pass, and there it cannot be told which block is meant. Checkpoint whole blocks."
            )

    def _branch_norm(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """A norm on a branch (sandwich norms); norms of the stream are dealt with where they are met."""
        call, out = self._open, output_tensor(output)
        if call is None or out is None or not args or call.is_stream(args[0]) or out.shape[-1] != call.entry_shape[-1]:
            return None
        new = normed(args[0], out, self._norm_choice(call))
        return with_output_tensor(output, new) if new is not out else None

    def _hooks(self, modules: Mapping[str, nn.Module]) -> Iterator[torch.utils.hooks.RemovableHandle]:
        yield from super()._hooks(modules)
        for stack in self.view.stacks:
            for name in dict.fromkeys(plan.parallel_mlp for plan in stack.plans):
                if name is not None:
                    yield modules[name].register_forward_hook(self._parallel_mlp)

    def _parallel_mlp(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call, out = self._open, output_tensor(output)
        if call is None or out is None:
            return None
        dropped = any(operation.mlp == "drop" for operation in self._for(call.stack.name, call.layer))
        return with_output_tensor(output, torch.zeros_like(out)) if dropped else None
