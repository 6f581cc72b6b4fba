"""What a probe learns inside one module call: adds onto its input, their branches, and attention."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankscope._errors import SiteError
from rankscope.models.stream import Stream
from rankscope.models.view import Label, Sums
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.frames import StreamFrame
from rankscope.stream.operators import ADDS, CONSTANTS, SHAPED_LIKE

CROSS_NAME = re.compile(r"cross|encoder_?attn|enc_?dec", re.IGNORECASE)
_MIXER_NAME = re.compile(r"mixer|mamba|ssm|fourier|recurrent|rwkv|rglru|hyena|lstm_?layer|conv", re.IGNORECASE)
_MLP_NAME = re.compile(r"mlp|ffn|feed_?forward|expert|moe|intermediate", re.IGNORECASE)


class Origin(IntFlag):
    """Where the values of a tensor come from, seen from one frame. Fresh: from the stream since its last add."""

    NONE = 0
    DERIVED = 1
    ATTENTION = 2
    CROSS = 4
    OTHER = 8
    FRESH = 16


@dataclass
class CallRecord:
    """What one module call showed: the raw material of discovery.

    Attributes:
        adds: one label for each add onto the call's own input, ``None`` where the branch does not come from it.
        joins: for each of these, whether its branch was computed before the add that came just before it.
        attention: for each attention call, how many adds came before it, and its kind.
        norms_at: for each norm of the stream or of a branch, how many adds came before it.
        ends_with_norm: whether a final norm closes the call, one the skips inside do not go through.
        post_norm: whether a branch is added to a norm of the stream.
        fed_by: the calls that gave back the very tensor this one took.
    """

    name: str
    module: nn.Module
    parent: CallRecord | None
    input_shape: torch.Size
    output_shape: torch.Size | None = None
    ends_with_norm: bool = False
    post_norm: bool = False
    norms_at: list[int] = field(default_factory=list)
    parallel_mlp: str | None = None
    adds: list[Label | None] = field(default_factory=list)
    joins: list[bool] = field(default_factory=list)
    attention: list[tuple[int, Literal["attention", "cross_attention"]]] = field(default_factory=list)
    final_norm: str | None = None
    fed_by: list[CallRecord] = field(default_factory=list)

    @property
    def labels(self) -> list[Label]:
        """Labels of the true skip adds."""
        return [label for label in self.adds if label is not None]

    @property
    def keeps_shape(self) -> bool:
        """Whether the output has the shape of the input."""
        return self.output_shape == self.input_shape

    @property
    def mixes(self) -> bool:
        """Whether tokens meet here, as far as can be seen."""
        return bool(self.attention) or bool({"attention", "mixer", "both"} & set(self.labels))

    @property
    def is_complete(self) -> bool:
        """Whether token mixing and an MLP are both added here: the mark of a transformer block."""
        labels = set(self.labels)
        return "both" in labels or ("mlp" in labels and bool(labels & {"attention", "mixer"}))


class ProbeFrame(StreamFrame):
    """A stream frame that also knows where every other tensor of the call comes from."""

    def __init__(self, entry: Tensor, record: CallRecord, attention_depth: int, sums: Sums = "plain") -> None:
        self._newest: dict[int, weakref.ref[Tensor]] = {}
        super().__init__(entry, sums)
        self.record = record
        self.names_since_add: list[str] = []
        self.adds_to_normed = False
        self.joined: Tensor | None = None
        self._attention_depth = attention_depth
        self._origins: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}

    def follow(self, tensor: Tensor) -> None:
        """From now on this object is the stream (as well)."""
        super().follow(tensor)
        self._newest[id(tensor)] = weakref.ref(tensor)

    def follow_normed(self, tensor: Tensor) -> None:
        """This object is a norm of the stream."""
        super().follow_normed(tensor)
        self._newest[id(tensor)] = weakref.ref(tensor)

    def tokens(self, batch: int, stream: Stream | None = None) -> int:
        """Number of tokens in the stream of this frame; -1 where it has other axes than were declared."""
        shape = self.entry_shape
        if stream is not None and stream.axes is not None:
            try:
                return stream.sizes(shape, batch)[1]
            except SiteError:
                return -1
        if len(shape) == 2:
            return shape[0] // batch
        middle = shape[1:-1] if shape[0] == batch else (shape[0],)
        return int(torch.Size(middle).numel())

    def origin(self, tensor: Tensor) -> Origin:
        """Origin of one tensor object."""
        if self.is_stream(tensor):
            return Origin.DERIVED | (Origin.FRESH if self._is_in(self._newest, tensor) else Origin.NONE)
        entry = self._origins.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else Origin.NONE

    def mark(self, tensor: Tensor, origin: Origin) -> None:
        """Set what is known of a tensor's origin."""
        self._origins[id(tensor)] = (weakref.ref(tensor), origin)

    def mark_attention(self, tensor: Tensor, crosses: bool) -> None:
        """This tensor comes out of attention, or out of a module that is one by name."""
        if not self.is_stream(tensor):
            cross = Origin.CROSS if crosses else Origin.NONE
            self.mark(tensor, self.origin(tensor) | Origin.DERIVED | Origin.ATTENTION | cross)

    def see_attention(
        self, call: AttentionCall, outputs: Sequence[Tensor], crosses_by_name: bool, *, counts: bool
    ) -> None:
        """Record an attention call; keys that do not come from the stream make it cross-attention.

        ``counts`` is false for attention among other tokens than those of this frame's stream.
        """
        foreign = (
            call.query is not None
            and call.key is not None
            and bool(self.origin(call.query))
            and not self.origin(call.key)
        )
        crosses = crosses_by_name or foreign
        if counts:
            self.record.attention.append((len(self.record.adds), "cross_attention" if crosses else "attention"))
        for tensor in outputs:
            self.mark_attention(tensor, crosses)

    def see_add(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Record an add onto the stream, if this is one; gives the tensor that is the stream."""
        found = self.match(func, args, kwargs) if func in self.sums else None
        if found is None:
            return None
        follows_a_skip = bool(self.record.adds) and self.record.adds[-1] is not None
        origin = Origin.NONE
        for tensor in found.branches:
            origin |= self.origin(tensor)
        label = self._label(origin)
        stale = label is not None and not origin & Origin.FRESH
        self.record.adds.append(label)
        self.record.joins.append(follows_a_skip and stale)
        self._age()
        self.adds_to_normed |= self.is_normed(found.carried)
        self.names_since_add.clear()
        return found.carried

    def _age(self) -> None:
        """The stream is about to change: nothing known so far is computed from what it becomes."""
        self._newest.clear()
        self._origins = {key: (ref, origin & ~Origin.FRESH) for key, (ref, origin) in self._origins.items()}

    def _label(self, origin: Origin) -> Label | None:
        if not origin & Origin.DERIVED:
            return None
        if origin & Origin.ATTENTION:
            if origin & Origin.OTHER:
                return "both"
            return "cross_attention" if origin & Origin.CROSS else "attention"
        names = " ".join(self.names_since_add)
        return "mixer" if _MIXER_NAME.search(names) and not _MLP_NAME.search(names) else "mlp"

    def spread(self, func: Callable[..., Any], inputs: list[Tensor], outputs: list[Tensor], depth: int) -> None:
        """Hand origins on from the inputs of a call to its outputs.

        ``depth`` is how many attention modules are open: outside of them, the sum of a tensor that comes
        from attention and one that does not is the joint branch of a parallel block.
        """
        if func in CONSTANTS:
            return
        if func in SHAPED_LIKE:
            inputs = inputs[:1]
        origins = [self.origin(tensor) for tensor in inputs]
        union = Origin.NONE
        for origin in origins:
            union |= origin
        if not union:
            return
        if func in ADDS and depth <= self._attention_depth and len(origins) == 2:
            from_attention = sum(bool(origin & Origin.ATTENTION) for origin in origins)
            if from_attention == 1 and all(origin & Origin.DERIVED for origin in origins):
                union |= Origin.OTHER
                if not any(self.is_stream(tensor) for tensor in inputs):
                    self.joined = next(t for t, o in zip(inputs, origins, strict=True) if not o & Origin.ATTENTION)
        for tensor in outputs:
            if not self.is_stream(tensor):
                self.mark(tensor, union)
