"""Runs one small forward pass to see how a model is built.

Every module call opens a frame that follows its own input as if it were a residual stream. Frames record the
adds onto that stream, with a label for each branch, and the attention calls. Discovery then selects the
frames that are blocks.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rankscope.errors import SiteError, UnsupportedOperationError
from rankscope.models.linear_maps import is_packed_linear
from rankscope.models.stream import Stream
from rankscope.models.view import Label, Sums
from rankscope.stream.attention_calls import (
    AttentionCall,
    from_sdpa,
    inside_multi_head,
    is_attention_shaped,
    is_over_keys,
)
from rankscope.stream.carries import KnownCall
from rankscope.stream.dataflow import Tape
from rankscope.stream.frames import ByTensor, StreamFrame, first_tensor, output_tensor, tensors_in
from rankscope.stream.operators import (
    ADDED_MATRIX_PRODUCTS,
    ADDS,
    CONSTANTS,
    JOINS,
    MIXER_NAME,
    MULTI_HEAD,
    NORMS,
    PRODUCTS,
    PROJECTIONS,
    SDPA,
    SHAPED_LIKE,
    SOFTMAXES,
    SUMS,
    is_attention,
    is_norm,
)
from rankscope.stream.states import LongSum, States

CROSS_NAME = re.compile(r"cross|encoder_?attn|enc_?dec", re.IGNORECASE)
_MATRIX_PRODUCTS = PRODUCTS | PROJECTIONS | ADDED_MATRIX_PRODUCTS | {torch.mm, Tensor.mm, torch.tensordot}
_MLP_NAME = re.compile(r"mlp|ffn|feed_?forward|expert|moe|intermediate", re.IGNORECASE)


class Ancestry(IntFlag):
    """Where the values of a tensor come from, relative to one frame.

    DERIVED: from the stream. ATTENTION, CROSS: through attention, cross-attention. OTHER: also through something else.
    FRESH: from the stream since its last add. MAPPED: through a product with a matrix.
    """

    NONE = 0
    DERIVED = 1
    ATTENTION = 2
    CROSS = 4
    OTHER = 8
    FRESH = 16
    MAPPED = 32


@dataclass
class CallRecord:
    """What was observed during one module call: the input of discovery.

    Attributes:
        adds: one label for each add onto the call's own input, ``None`` if the branch does not come from it.
        joins: for each of these, whether its branch was computed before the previous add.
        attention: for each attention call, how many adds came before it, and its kind.
        norms_at: for each norm of the stream or of a branch, how many adds came before it.
        ends_with_norm: whether the call ends with a final norm that the skips inside do not go through.
        post_norm: whether a branch is added to a norm of the stream.
        fed_by: the calls that returned the exact tensor that this one received.
        is_lost: whether the stream was read together with a branch, and what came of it is not what was returned.
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
    is_lost: bool = False

    @property
    def labels(self) -> list[Label]:
        """Labels of the genuine skip adds."""
        return [label for label in self.adds if label is not None]

    @property
    def keeps_shape(self) -> bool:
        """Whether the output has the shape of the input."""
        return self.output_shape == self.input_shape

    @property
    def mixes(self) -> bool:
        """Whether tokens are mixed here, as far as can be seen."""
        return bool(self.attention) or bool({"attention", "mixer", "both"} & set(self.labels))

    @property
    def is_complete(self) -> bool:
        """Whether token mixing and an MLP are both added here, as in a transformer block."""
        labels = set(self.labels)
        return "both" in labels or ("mlp" in labels and bool(labels & {"attention", "mixer"}))


class ProbeFrame(StreamFrame):
    """A stream frame that also tracks where every other tensor of the call comes from."""

    def __init__(self, entry: Tensor, record: CallRecord, attention_depth: int, sums: Sums = "plain") -> None:
        self._newest = ByTensor[None]()
        super().__init__(entry, sums)
        self.record = record
        self.names_since_add: list[str] = []
        self.adds_to_normed = False
        self.has_superseded = False
        self.joined: Tensor | None = None
        self._attention_depth = attention_depth
        self._ancestries = ByTensor[Ancestry]()

    def follow(self, tensor: Tensor) -> None:
        """From now on this object is (also) the stream."""
        super().follow(tensor)
        self._newest[tensor] = None

    def follow_normed(self, tensor: Tensor) -> None:
        """This object is a norm of the stream."""
        super().follow_normed(tensor)
        self._newest[tensor] = None

    def supersede(self, tensor: Tensor) -> None:
        """From now on this object alone is the stream."""
        super().supersede(tensor)
        self.has_superseded = True

    def tokens(self, batch: int, stream: Stream | None = None) -> int:
        """Number of tokens in the stream of this frame; -1 if its axes are not the declared ones."""
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

    def ancestry(self, tensor: Tensor) -> Ancestry:
        """The ancestry of one tensor object."""
        if self.is_stream(tensor):
            return Ancestry.DERIVED | (Ancestry.FRESH if tensor in self._newest else Ancestry.NONE)
        return self._ancestries.get(tensor) or Ancestry.NONE

    def mark(self, tensor: Tensor, ancestry: Ancestry) -> None:
        """Set the ancestry of a tensor."""
        self._ancestries[tensor] = ancestry

    def mark_attention(self, tensor: Tensor, crosses: bool) -> None:
        """Mark a tensor as the output of attention, or of a module named like attention."""
        if not self.is_stream(tensor):
            cross = Ancestry.CROSS if crosses else Ancestry.NONE
            self.mark(tensor, self.ancestry(tensor) | Ancestry.DERIVED | Ancestry.ATTENTION | cross)

    def see_attention(
        self, call: AttentionCall, outputs: Sequence[Tensor], crosses_by_name: bool, *, counts: bool
    ) -> None:
        """Record an attention call; it is cross-attention if its keys do not come from the stream.

        ``counts`` is False for attention between tokens other than those of this frame's stream.
        """
        foreign = (
            call.query is not None
            and call.key is not None
            and bool(self.ancestry(call.query))
            and not self.ancestry(call.key)
        )
        crosses = crosses_by_name or foreign
        if counts:
            self.record.attention.append((len(self.record.adds), "cross_attention" if crosses else "attention"))
        for tensor in outputs:
            self.mark_attention(tensor, crosses)

    def see_add(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Record an add onto the stream, if this is one; returns the tensor that is the stream."""
        found = self.match(func, args, kwargs) if func in self.sums else None
        if found is None:
            return None
        follows_a_skip = bool(self.record.adds) and self.record.adds[-1] is not None
        ancestry = Ancestry.NONE
        for tensor in found.branches:
            ancestry |= self.ancestry(tensor)
        label = self._label(ancestry)
        # A branch computed before the previous add is parallel to it: x + attention(x), then + mlp(x).
        stale = label is not None and not ancestry & Ancestry.FRESH
        self.record.adds.append(label)
        self.record.joins.append(follows_a_skip and stale)
        self._age()
        self.adds_to_normed |= self.is_normed(found.carried)
        self.names_since_add.clear()
        return found.carried

    def _age(self) -> None:
        """The stream is about to change: no tensor seen so far is computed from its new value."""
        self._newest.clear()
        self._ancestries.change(lambda ancestry: ancestry & ~Ancestry.FRESH)

    def _label(self, ancestry: Ancestry) -> Label | None:
        if not ancestry & Ancestry.DERIVED:
            return None
        if ancestry & Ancestry.ATTENTION:
            if ancestry & Ancestry.OTHER:
                return "both"
            return "cross_attention" if ancestry & Ancestry.CROSS else "attention"
        names = " ".join(self.names_since_add)
        if not names and not ancestry & Ancestry.MAPPED:
            return "mixer"  # no module and no matrix, as a shift or a mean of tokens: not an MLP
        # Otherwise names are the only evidence for a mixer; everything else that is not attention counts as an MLP.
        return "mixer" if MIXER_NAME.search(names) and not _MLP_NAME.search(names) else "mlp"

    def spread(self, func: Callable[..., Any], inputs: list[Tensor], outputs: list[Tensor], depth: int) -> None:
        """Pass ancestries on from the inputs of a call to its outputs.

        ``depth`` is the number of active attention modules: outside of them, the sum of a tensor from attention and
        one that is not from attention is the joint branch of a parallel block.
        """
        if func in CONSTANTS:
            return
        if func in SHAPED_LIKE:
            inputs = inputs[:1]
        ancestries = [self.ancestry(tensor) for tensor in inputs]
        union = Ancestry.NONE
        for ancestry in ancestries:
            union |= ancestry
        if not union:
            return
        if func in _MATRIX_PRODUCTS:
            union |= Ancestry.MAPPED
        # A parallel block adds attention(x) + mlp(x) first and the sum to the stream afterwards.
        if func in ADDS and depth <= self._attention_depth and len(ancestries) == 2:
            from_attention = sum(bool(ancestry & Ancestry.ATTENTION) for ancestry in ancestries)
            if from_attention == 1 and all(ancestry & Ancestry.DERIVED for ancestry in ancestries):
                union |= Ancestry.OTHER
                if not any(self.is_stream(tensor) for tensor in inputs):
                    self.joined = next(t for t, o in zip(inputs, ancestries, strict=True) if not o & Ancestry.ATTENTION)
        for tensor in outputs:
            if not self.is_stream(tensor):
                self.mark(tensor, union)


class LongSkips:
    """Finds the long skips of one stack while the probe runs, once it is known which module calls are its blocks.

    Attributes:
        found: for each long skip, the first and the last block that it goes around, and the block calls begun.
        is_lost: whether the result of one did not become the stream that the next block takes.
    """

    def __init__(self, calls: Mapping[int, KnownCall]) -> None:
        self.found: list[tuple[int, int, int]] = []
        self.is_lost = False
        self._calls = calls
        self._begun = 0
        self._states: States | None = None
        self._before: list[weakref.ref[Tensor]] = []
        self._frame: ProbeFrame | None = None

    def enter(self, number: int, entry: Tensor, frame: ProbeFrame) -> None:
        """A module call begins."""
        if number not in self._calls:
            return
        if self._states is None:
            self._states = States(entry, self._before)
        elif self._states.number_of(entry) is None:
            self._check(entry)
            self._states.reach(entry, self._calls[number].first)
        self._begun += 1
        self._frame = frame

    def leave(self, number: int, out: Tensor) -> None:
        """A module call ends."""
        if number in self._calls and self._states is not None:
            self._states.reach(out, self._calls[number].last + 1)
            self._frame = None

    def note_sum(self, number: int, add: int, stream: Tensor, out: Tensor) -> None:
        """A branch was added to the stream in a module call, as its add of that number."""
        if number in self._calls and self._states is not None:
            self._check(stream)
            self._states.reach(out, self._calls[number].adds[add][0])

    def _check(self, stream: Tensor) -> None:
        """Since the last long skip, if one has just been met, what goes on as the stream must be its result."""
        assert self._states is not None
        if self.found and self.found[-1][2] == self._begun and self._states.number_of(stream) is None:
            self.is_lost = True

    def match(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> LongSum | None:
        """The long skip that this call is."""
        found = None if self._states is None else self._states.long_sum(func, args, kwargs)
        if found is not None:
            self.found.append((found.first, found.last, self._begun))
        return found

    def see(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, found: LongSum | None
    ) -> None:
        """A call has run."""
        if self._states is None:
            self._before += map(weakref.ref, tensors_in(out))
            return
        # Inside a block, the result has to be what the block goes on with, and not a gate or a further branch.
        if self._states.see(func, args, kwargs, out, found) and self._frame is not None:
            self.is_lost |= not self._frame.is_stream(out)


def probe(
    model: nn.Module,
    run: Callable[[], object],
    batch: int,
    stream: Stream | None = None,
    sums: Sums = "plain",
    long_skips: Mapping[int, LongSkips] | None = None,
) -> tuple[list[CallRecord], Tape]:
    """Run the model once through ``run``: a record of each module call, in order of entry, and all operations.

    ``long_skips`` look for long skips in the same pass, by the number under which the tape records them.
    """
    mode = _Probe(batch, stream, sums, long_skips or {})
    with ExitStack() as stack:
        for name, module in model.named_modules():
            normalises = bool(name) and is_norm(module)  # the model itself is not one of its norms
            stack.callback(module.register_forward_pre_hook(mode.enter(name, normalises), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(mode.leave(name, normalises), with_kwargs=True).remove)
        try:
            with torch.no_grad(), mode.tape, mode:
                run()
        except NotImplementedError as error:
            found = re.search(r"HigherOrderOperator (\w+)", str(error))
            if found is None:
                raise
            raise UnsupportedOperationError(
                f"{mode.tape.module or 'the model'} calls {found[1]}, which takes a function as an argument: what "
                "happens inside it cannot be followed. Use another form, such as attn_implementation='sdpa'."
            ) from error
    return mode.records, mode.tape


class _Probe(TorchFunctionMode):
    def __init__(self, batch: int, stream: Stream | None, sums: Sums, long_skips: Mapping[int, LongSkips]) -> None:
        super().__init__()
        self._stream = stream
        self._long_skips = long_skips
        self.tape = Tape()
        self._sums = sums
        self.records: list[CallRecord] = []
        self.numbers: dict[int, int] = {}
        self._batch = batch
        self._frames: list[ProbeFrame] = []
        self._open: list[ProbeFrame | None] = []
        self._attention_modules: list[str] = []
        self._products = ByTensor[None]()
        self._returned = ByTensor[list[CallRecord]]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._frames and not self._long_skips:
            before = self.tape.begin_function(func, ())
            try:
                return func(*args, **kwargs)
            finally:
                self.tape.end_function(before)
        # Every active module call has a frame, from the model down to the innermost module; each one follows its own
        # input, because it is not yet known which of them are blocks.
        is_sum = func in SUMS or func in JOINS
        added = [frame.see_add(func, args, kwargs) for frame in self._frames] if is_sum else []
        inputs = tensors_in((args, kwargs), depth=3)
        skips = [
            (self.numbers[id(frame.record)], len(frame.record.adds) - 1, stream)
            for frame, stream in zip(self._frames, added, strict=False)
            if stream is not None
        ]
        long_sums = {key: found.match(func, args, kwargs) for key, found in self._long_skips.items()}
        skips += [
            (key, len(self._long_skips[key].found) - 1, found.carried)
            for key, found in long_sums.items()
            if found is not None
        ]
        before = self.tape.begin_function(func, skips)
        try:
            out = self._run(func, args, kwargs, inputs)
        finally:
            self.tape.end_function(before)
        for frame, stream in zip(self._frames, added, strict=False):
            if stream is not None and func in JOINS:
                frame.follow_joined(func, args, kwargs, out)
            elif stream is not None:
                frame.follow(out)
                for found in self._long_skips.values():
                    found.note_sum(self.numbers[id(frame.record)], len(frame.record.adds) - 1, stream, out)
        for key, found in self._long_skips.items():
            found.see(func, args, kwargs, out, long_sums[key])
        return out

    def _run(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[Tensor]
    ) -> Any:
        if func is MULTI_HEAD:
            calls, out = _inside_multi_head(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
            calls = self._attention_calls(func, args, kwargs, out)
        # A call without a result, such as x[i] = y, has changed its first input.
        outputs = tensors_in(out) or inputs[:1]
        if func in PRODUCTS or (func not in PROJECTIONS and any(tensor in self._products for tensor in inputs)):
            for tensor in outputs:
                self._products[tensor] = None
        for frame in self._frames:
            frame.spread(func, inputs, outputs, len(self._attention_modules))
            frame.pass_on(func, args, out)
            frame.makes_one_stream(func, args, kwargs, out)
            if func in NORMS and frame.ancestry(inputs[0]):
                frame.record.norms_at.append(len(frame.record.adds))
            if frame.joined is not None:
                frame.record.parallel_mlp = self._weighty_giver_of(frame.joined)
                frame.joined = None
            for call in calls:
                fits = call.weights is None or self._fits(call.weights, frame)
                frame.see_attention(call, outputs, self._crosses_by_name(), counts=fits)
        return out

    def _attention_calls(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> list[AttentionCall]:
        if func is SDPA:
            call = from_sdpa(args, kwargs)
            return [] if call is None else [call]
        over_keys = func in SOFTMAXES and is_over_keys(args, kwargs)
        fits = over_keys and any(self._fits(out, frame) and self._are_scores(args[0], frame) for frame in self._frames)
        return [AttentionCall(weights=out)] if fits else []

    def _are_scores(self, scores: Tensor, frame: ProbeFrame) -> bool:
        """Whether a softmax over the last axis is a softmax over keys, and not over the features of a projection.

        The last axis must be as long as the stream (or one longer, with a sink), or the scores must come from a product
        of queries and keys.
        """
        return scores in self._products or scores.shape[-1] - frame.tokens(self._batch, self._stream) in (0, 1)

    def _fits(self, probs: Tensor, frame: ProbeFrame) -> bool:
        inside = bool(self._attention_modules)
        return is_attention_shaped(probs, self._batch, frame.tokens(self._batch, self._stream), inside)

    def _crosses_by_name(self) -> bool:
        return any(CROSS_NAME.search(name) for name in self._attention_modules)

    def enter(self, name: str, normalises: bool) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        """A pre-hook that opens a frame on the module's input."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._open:
                self.tape.note_input((args, kwargs))
            entry = first_tensor(args, kwargs)
            own_name = f"{name.rpartition('.')[2]} {type(module).__name__}"
            for frame in self._frames:
                frame.names_since_add.append(own_name)
            opened: ProbeFrame | None = None
            # A module that is given only ids has no stream, and opens no frame. It still takes a place in ``_open``,
            # because the hook on leaving takes one away.
            if entry is not None:
                parent = next((f.record for f in reversed(self._open) if f is not None), None)
                record = CallRecord(name, module, parent, entry.shape, fed_by=self._givers_of(entry))
                self.numbers[id(record)] = len(self.records)
                self.tape.note_edge(len(self.records), name, entry, begins=True)
                self.records.append(record)
                opened = ProbeFrame(entry, record, len(self._attention_modules), self._sums)
                self._frames.append(opened)
                for found in self._long_skips.values():
                    found.enter(self.numbers[id(record)], entry, opened)
            self.tape.enter(name, normalises)
            self._open.append(opened)
            if is_attention(name, type(module)):
                self._attention_modules.append(own_name)

        return hook

    def leave(self, name: str, normalises: bool) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        """A hook that closes the frame and records what the module returned."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            frame = self._open.pop()
            out, entry = output_tensor(output), first_tensor(args, kwargs)
            if is_packed_linear(module) and entry is not None and out is not None:
                self.tape.leave_matrix(entry, out)
            else:
                self.tape.leave()
            if frame is not None:
                self._frames.remove(frame)
                self.tape.note_edge(self.numbers[id(frame.record)], name, out, begins=False)
                if out is not None:
                    for found in self._long_skips.values():
                        found.leave(self.numbers[id(frame.record)], out)
                    frame.record.output_shape = out.shape
                    frame.record.post_norm = frame.adds_to_normed
                    frame.record.is_lost = frame.has_superseded and not frame.is_stream(out)
                    frame.record.ends_with_norm = frame.is_normed(out) and not frame.adds_to_normed
                    if normalises:
                        self._note_norm(name, entry, out)
                    self._returned[out] = [*self._givers_of(out), frame.record]
            # What a module named like attention returns comes from attention, even if no kernel was recognised inside.
            if is_attention(name, type(module)):
                if out is not None:
                    for outer in self._frames:
                        outer.mark_attention(out, self._crosses_by_name())
                self._attention_modules.pop()

        return hook

    def _note_norm(self, name: str, x: Tensor | None, out: Tensor) -> None:
        if x is None:
            return
        for frame in self._frames:
            if frame.ancestry(x):
                frame.record.norms_at.append(len(frame.record.adds))
            if frame.is_stream(x):
                frame.follow_normed(out)
        for record in self._givers_of(x):
            record.final_norm = name

    def _weighty_giver_of(self, tensor: Tensor) -> str | None:
        """The module with weights that returned this tensor; dropouts in between return the same object."""
        givers = self._givers_of(tensor)
        return next((record.name for record in givers if any(True for _ in record.module.parameters())), None)

    def _givers_of(self, tensor: Tensor) -> list[CallRecord]:
        """The calls that returned this exact tensor."""
        return self._returned.get(tensor) or []


def _inside_multi_head(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[AttentionCall], Any]:
    """Run torch's own multi-head attention; its attention call is recorded with the module's inputs."""
    query, key = (args[0], args[1]) if args else (kwargs["query"], kwargs["key"])
    calls: list[AttentionCall] = []

    def note(perform: Callable[..., Any], inner_args: Sequence[Any], inner_kwargs: Mapping[str, Any]) -> Any:
        calls.append(AttentionCall(query=query, key=key))
        return perform(*inner_args, **inner_kwargs)

    out = inside_multi_head(func, args, kwargs, note, note)
    return calls, out
