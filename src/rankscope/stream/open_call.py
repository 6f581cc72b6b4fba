"""A block call under way: its stream, and how far through its plan it is."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rankscope._errors import SiteError
from rankscope.models.view import BlockCall, Label, Stack
from rankscope.stream.frames import StreamFrame
from rankscope.stream.sites import SiteRef

AttentionKind = Literal["attention", "cross_attention"]


class OpenCall(StreamFrame):
    """Follows the stream through one call and checks off what the probe said would happen."""

    def __init__(self, entry: Tensor, stack: Stack, number: int) -> None:
        super().__init__(entry, stack.sums)
        self.stack = stack
        self.number = number
        self.call: BlockCall = stack.calls[number]
        self.block = 0
        self.last_sum: Tensor | None = None
        blocks = self.call.blocks
        self._adds = [(i, label) for i, plan in enumerate(blocks) for label in plan.adds]
        self._joins = [join for plan in blocks for join in plan.joins]
        self._attention = [(i, kind) for i, plan in enumerate(blocks) for kind in plan.attention]
        self._adds_seen = 0
        self._attention_seen = 0

    @property
    def layer(self) -> int:
        """Number of the block that is running."""
        return self.call.first_layer + self.block

    def ref(self, site: str) -> SiteRef:
        """A site of the block that is running."""
        return SiteRef(self.stack.name, self.layer, site)

    def next_add(self) -> tuple[int, Label | None]:
        """Block (counted inside this call) and label of the add that is happening."""
        if self._adds_seen == len(self._adds):
            raise SiteError(self._surprise("more adds onto the stream than when the model was probed"))
        self._adds_seen += 1
        return self._adds[self._adds_seen - 1]

    @property
    def joins(self) -> bool:
        """Whether the add that is happening brings a parallel branch to the sum of the one before."""
        return self._joins[self._adds_seen - 1]

    @property
    def is_joined(self) -> bool:
        """Whether the next add brings a parallel branch to the sum of this one."""
        return self._adds_seen < len(self._adds) and self._joins[self._adds_seen]

    @property
    def adds_are_over(self) -> bool:
        """Whether every add of the block that is running has happened."""
        return all(block != self.block for block, _ in self._adds[self._adds_seen :])

    @property
    def is_at_final_norm(self) -> bool:
        """Whether a norm met now is the final norm of the stack, and not one of a block."""
        return self.call.final_norm_inside and self._adds_seen == len(self._adds)

    @property
    def has_attention(self) -> bool:
        """Whether the probe saw attention in this call."""
        return bool(self._attention)

    def next_attention(self) -> SiteRef:
        """The site of the attention call that is happening."""
        if self._attention_seen == len(self._attention):
            raise SiteError(self._surprise("more attention calls than when the model was probed"))
        self._attention_seen += 1
        block, kind = self._attention[self._attention_seen - 1]
        return SiteRef(self.stack.name, self.call.first_layer + block, f"{kind}.probs")

    def check_complete(self, *, attention: bool) -> None:
        """Raise unless everything the probe saw has happened."""
        if self._adds_seen != len(self._adds):
            raise SiteError(self._surprise(f"{self._adds_seen} of {len(self._adds)} adds onto the stream"))
        if attention and self._attention_seen != len(self._attention):
            raise SiteError(self._surprise(f"{self._attention_seen} of {len(self._attention)} attention calls"))

    def canonical(self, tensor: Tensor) -> Tensor:
        """The tensor as ``batch tokens dim``, whatever order or flattening the block works in."""
        shape = self.entry_shape
        if tensor.shape != shape and tensor.numel() == shape.numel():
            tensor = tensor.reshape(shape)
        if self.stack.layout == "tokens batch dim":
            tensor = tensor.transpose(0, 1)
        return tensor.flatten(1, -2) if tensor.dim() > 3 else tensor

    def batch_and_tokens(self) -> tuple[int, int]:
        """How many sequences and tokens the stream holds."""
        shape = self.entry_shape
        if self.stack.layout == "tokens batch dim":
            return shape[1], shape[0]
        return shape[0], int(torch.Size(shape[1:-1]).numel())

    def _surprise(self, what: str) -> str:
        return (
            f"In block {self.layer} ({self.call.module_name}) the tracer saw {what}. "
            "The model takes another path on this input than on the probe: measure it with inputs of the same kind."
        )
