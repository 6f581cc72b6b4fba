"""A block call under way: its stream, and how far through its plan it is."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rankscope._errors import SiteError
from rankscope.models.inputs import sequences_in_pass
from rankscope.models.view import BlockCall, Label, Stack
from rankscope.stream.frames import StreamFrame
from rankscope.stream.sites import SiteRef

AttentionKind = Literal["attention", "cross_attention"]


class OpenCall(StreamFrame):
    """Follows the stream through one call and checks off what the probe said would happen.

    ``taken`` is what the model's own loop adds to what the call gives back, where its skips go around the blocks; the
    loop holds on to it as well, so that keeping it costs nothing.
    """

    def __init__(self, entry: Tensor, stack: Stack, number: int, taken: Tensor | None = None) -> None:
        super().__init__(entry, stack.sums)
        self.taken = taken if stack.stream.skips == "around" else None
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
        self._sequences = sequences_in_pass()
        self._check_batch()

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
        flattened = tensor.dim() != len(shape) or self.is_stream(tensor)
        if flattened and tensor.shape != shape and tensor.numel() == shape.numel():
            tensor = tensor.reshape(shape)
        return self.stack.stream.canonical(tensor, self._sequences)

    def native(self, x: Tensor, like: Tensor) -> Tensor:
        """A stream ``batch tokens dim`` in the order and flattening of ``like``, a tensor of this call."""
        return self.stack.stream.native(x, self.entry_shape, self._sequences).reshape(like.shape)

    def batch_and_tokens(self) -> tuple[int, int]:
        """How many sequences and tokens the stream holds."""
        return self.stack.stream.sizes(self.entry_shape, self._sequences)[:2]

    def _check_batch(self) -> None:
        """Raise where the stream does not hold the sequences of the batch that runs."""
        batch, tokens = self.batch_and_tokens()
        if self._sequences is not None and batch != self._sequences:
            raise SiteError(
                f"Block {self.layer} ({self.call.module_name}) took a tensor of shape {tuple(self.entry_shape)}, read "
                f"as '{self.stack.stream}': {batch} sequences of {tokens} tokens, where the inputs hold "
                f"{self._sequences} sequences. Declare the order of its axes, e.g. "
                "stream=rankscope.Stream('batch dim tokens'), or --layout 'batch dim tokens'."
            )

    def _surprise(self, what: str) -> str:
        return (
            f"In block {self.layer} ({self.call.module_name}) the tracer saw {what}. "
            "The model takes another path on this input than on the probe: measure it with inputs of the same kind."
        )
