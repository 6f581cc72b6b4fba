"""One call of a block while it runs: its stream, and which sum, norm or attention call of the recorded ones comes next.

Gradient checkpointing runs blocks again in the backward pass. The input identifies which call of a block is being
repeated: checkpointing passes the block the tensor it had in the forward pass, or a detached one with the same storage.
Only weak references are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rankscope.errors import SiteError
from rankscope.models.inputs import sequences_in_pass
from rankscope.models.view import BlockCall, Label, Stack
from rankscope.stream.attention_calls import is_attention_shaped
from rankscope.stream.frames import SkipSum, StreamFrame
from rankscope.stream.sites import SiteRef

AttentionKind = Literal["attention", "cross_attention"]


SavingHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Any]]


def saving_hooks() -> SavingHooks | None:
    """What packs and unpacks tensors that are saved for the backward pass now: a checkpoint, for example."""
    found: SavingHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


class ActiveBlock(StreamFrame):
    """Follows the stream through one call and checks it against what the probe saw.

    ``taken`` is the tensor that the model's own loop adds to the output of the call, if the skips go around the blocks.
    The loop keeps a reference to it anyway, so keeping one here costs no memory. ``entered`` is a copy of the stream,
    ``batch tokens dim``, as it entered the current block, kept only if a mode needs it when the block ends. ``saving``
    is the checkpoint around the call, if there is one.
    """

    def __init__(self, entry: Tensor, stack: Stack, number: int, taken: Tensor | None = None) -> None:
        super().__init__(entry, stack.sums)
        self.taken = taken if stack.stream.skips == "around" else None
        self.stack = stack
        self.number = number
        self.call: BlockCall = stack.calls[number]
        self.block = 0
        self.last_sum: Tensor | None = None
        self.entered: Tensor | None = None
        self.sum: SkipSum | None = None
        self.label: Label | None = None
        blocks = self.call.blocks
        self._adds = [(i, label) for i, plan in enumerate(blocks) for label in plan.adds]
        self._joins = [join for plan in blocks for join in plan.joins]
        self._attention = [(i, kind) for i, plan in enumerate(blocks) for kind in plan.attention]
        self._adds_seen = 0
        self._attention_seen = 0
        self._softmaxes_seen = 0
        self._norms_seen = Counter[str]()
        self.saving = saving_hooks()
        self._met: list[tuple[object, bool]] = []
        self._expected: list[tuple[object, bool]] | None = None
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
        """Whether the current add adds a parallel branch to the sum of the previous one."""
        return self._joins[self._adds_seen - 1]

    @property
    def is_joined(self) -> bool:
        """Whether the next add adds a parallel branch to the sum of this one."""
        return self._adds_seen < len(self._adds) and self._joins[self._adds_seen]

    @property
    def adds_are_over(self) -> bool:
        """Whether every add of the block that is running has happened."""
        return all(block != self.block for block, _ in self._adds[self._adds_seen :])

    @property
    def is_at_final_norm(self) -> bool:
        """Whether a norm that runs now is the final norm of the stack, and not one of a block."""
        return self.call.final_norm_inside and self._adds_seen == len(self._adds)

    @property
    def has_attention(self) -> bool:
        """Whether the probe saw attention in this call."""
        return bool(self._attention)

    @property
    def awaited_attention(self) -> AttentionKind | None:
        """The kind of the next attention call; None if all have happened."""
        return self._attention[self._attention_seen][1] if self._attention_seen < len(self._attention) else None

    def next_attention(self) -> SiteRef:
        """The site of the attention call that is happening."""
        if self._attention_seen == len(self._attention):
            raise SiteError(self._surprise("more attention calls than when the model was probed"))
        self._attention_seen += 1
        block, kind = self._attention[self._attention_seen - 1]
        return SiteRef(self.stack.name, self.call.first_layer + block, f"{kind}.probs")

    def again(self) -> ActiveBlock:
        """This call from here on, for a part of it that runs once more; it has to meet the stream where it does now."""
        other = copy(self)
        other._aliases, other._normed = self._aliases.copied(), self._normed.copied()
        other._norms_seen, other._met = self._norms_seen.copy(), [*self._met]
        other._expected = self._met if self._expected is None else self._expected
        return other

    def meet(self, what: object, is_stream: bool) -> bool:
        """Note whether an operation takes the stream; what runs again is checked against what ran before."""
        self._met.append((what, is_stream))
        if self._expected is not None and self._expected[len(self._met) - 1 : len(self._met)] != self._met[-1:]:
            raise SiteError(
                f"In block {self.layer} ({self.call.module_name}) gradient checkpointing runs a part again, and not as "
                "in the forward pass: its input is another tensor, or it takes another path. Checkpoint whole blocks."
            )
        return is_stream

    def next_norm(self, module: str) -> tuple[str, int]:
        """The norm call that is happening, as :class:`BranchParts` names it; no module for a function."""
        self._norms_seen[module] += 1
        return module, self._norms_seen[module] - 1

    def is_attention(self, scores: Tensor) -> bool:
        """Whether the softmax over the last axis of these scores, which is happening, is attention.

        One more than the probe saw counts if it looks like attention, and is then refused.
        """
        known, number = self.call.softmaxes, self._softmaxes_seen
        self._softmaxes_seen += 1
        is_meant = known[number] if number < len(known) else scores.dim() == 4
        return is_meant and is_attention_shaped(scores, *self.batch_and_tokens())

    def check_complete(self, *, attention: bool) -> None:
        """Raise unless everything the probe saw has happened."""
        if self._adds_seen != len(self._adds):
            raise SiteError(self._surprise(f"{self._adds_seen} of {len(self._adds)} adds onto the stream"))
        if attention and self._attention_seen != len(self._attention):
            raise SiteError(self._surprise(f"{self._attention_seen} of {len(self._attention)} attention calls"))

    def canonical(self, tensor: Tensor) -> Tensor:
        """The tensor as ``batch tokens dim``, regardless of the order or flattening the block works in."""
        return self.stack.stream.canonical(self._shaped(tensor), self._sequences)

    def apart(self, tensor: Tensor) -> Tensor:
        """The streams of each token, as ``batch tokens streams dim``."""
        return self.stack.stream.apart(self._shaped(tensor), self._sequences)

    def _shaped(self, tensor: Tensor) -> Tensor:
        shape = self.entry_shape
        flattened = tensor.dim() != len(shape) or self.is_stream(tensor)
        return tensor.reshape(shape) if flattened and tensor.numel() == shape.numel() else tensor

    def per_token(self, rows: Tensor) -> Tensor:
        """Numbers per token, in the order of the tokens of this call, as ``batch tokens width``."""
        if self.stack.stream.has_streams:
            # A branch reads one stream per token, as batch tokens dim in every known model.
            return rows.reshape(*self.batch_and_tokens(), -1)
        return self.stack.stream.canonical(rows.reshape(*self.entry_shape[:-1], -1), self._sequences)

    def native(self, x: Tensor, like: Tensor) -> Tensor:
        """A stream ``batch tokens dim`` in the order and flattening of ``like``, a tensor of this call."""
        return self.stack.stream.native(x, self.entry_shape, self._sequences).reshape(like.shape)

    def batch_and_tokens(self) -> tuple[int, int]:
        """Number of sequences and tokens in the stream."""
        return self.stack.stream.sizes(self.entry_shape, self._sequences)[:2]

    def _check_batch(self) -> None:
        """Raise if the stream does not contain the sequences of the current batch."""
        if self.stack.stream.takes == "branch":
            return
        if self._sequences is None and self.stack.stream.folds_batch:
            raise SiteError(
                f"Block {self.layer} ({self.call.module_name}) takes a stream '{self.stack.stream}': its sequences "
                "share an axis, and how many there are is known only in passes that rankscope runs. Give the surgery "
                "to a verb, e.g. rankscope.measure(model, inputs, surgery), instead of running the model in operate()."
            )
        batch, tokens = self.batch_and_tokens()
        if self._sequences is not None and batch != self._sequences:
            raise SiteError(
                f"Block {self.layer} ({self.call.module_name}) took a tensor of shape {tuple(self.entry_shape)}, read "
                f"as '{self.stack.stream}': {batch} sequences of {tokens} tokens, but the inputs hold "
                f"{self._sequences} sequences. Declare the order of its axes, e.g. "
                "stream=rankscope.Stream('batch dim tokens'), or --layout 'batch dim tokens'."
            )

    def _surprise(self, what: str) -> str:
        return (
            f"In block {self.layer} ({self.call.module_name}) the tracer saw {what}. "
            "The model takes another path on this input than on the probe: measure it with inputs of the same kind."
        )


def in_backward() -> bool:
    """Whether autograd is currently running."""
    return torch._C._current_graph_task_id() != -1


class CallMemory:
    """Remembers which call took which tensor, as long as that tensor is alive."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str | None, StorageWeakRef], int] = {}
        self._latest: dict[str | None, int] = {}

    def begin_pass(self) -> None:
        """Forget tensors that no longer exist."""
        self._numbers = {key: number for key, number in self._numbers.items() if not key[1].expired()}  # type: ignore[no-untyped-call]
        self._latest.clear()

    def remember(self, stack: Stack, number: int, entry: Tensor) -> None:
        """Record that this tensor is the input of this call."""
        self._numbers[stack.name, _storage(entry)] = number

    def remember_output(self, stack: Stack, number: int, out: Tensor) -> None:
        """Record the output of a repeated call: if several blocks are repeated together, it is the next one's input."""
        self.remember(stack, number + 1, out)

    def number(self, stack: Stack, module_name: str, entry: Tensor) -> int:
        """The call that is being repeated. If its input is no longer known (offloaded), assume reverse order."""
        # A shared module (ALBERT) has several calls; the backward pass repeats them from the last to the first.
        numbers = [i for i, call in enumerate(stack.calls) if call.module_name == module_name]
        known = self._numbers.get((stack.name, _storage(entry)))
        if known not in numbers:
            latest = self._latest.get(stack.name, len(stack.calls))
            known = ([number for number in numbers if number < latest] or numbers)[-1]
        self._latest[stack.name] = known
        return known


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
