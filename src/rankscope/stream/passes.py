"""Runs one small forward pass to see how a model is built.

Every module call opens a frame that follows its own input as if it were a residual stream. Frames record the sums onto
that stream, what each branch is, and the attention calls. Discovery then selects the calls that are blocks.

All operations of the pass are recorded, and the contents of values are kept from one block to the next, so that what a
branch does can be asked by replaying it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode

from rankscope.errors import SiteError
from rankscope.models.linear_maps import is_packed_linear
from rankscope.models.stream import Stream
from rankscope.models.view import Label, Response, Sums
from rankscope.models.wrapping import hidden
from rankscope.pass_graph.identity import ByTensor
from rankscope.pass_graph.ir import Value
from rankscope.pass_graph.record import GraphRecorder
from rankscope.stream.attention_calls import (
    AttentionCall,
    inside_multi_head,
    is_attention_shaped,
    is_over_keys,
    sdpa_arguments,
)
from rankscope.stream.branches import MATRIX_PRODUCTS, Attention, Branch, Giver, Seen, Strand, of_call
from rankscope.stream.frames import SkipSum, StreamFrame, first_tensor, output_tensor, tensors_in
from rankscope.stream.long_skips import LongSkips
from rankscope.stream.operators import (
    ADDED_MATRIX_PRODUCTS,
    CONSTANTS,
    JOINS,
    MULTI_HEAD,
    NORMS,
    PRODUCTS,
    QUERIES,
    SDPA,
    SOFTMAXES,
    SUMS,
    is_flex,
    is_norm,
)
from rankscope.stream.tokens import Tokens

_T = Tensor
_READS: frozenset[Callable[..., Any]] = frozenset(
    {_T.item, _T.tolist, _T.numpy, _T.__array__, _T.__bool__, _T.__int__, _T.__float__, _T.__index__}
)
"""Calls that turn a tensor into numbers, on which what the author's code does next may depend."""


@dataclass
class CallRecord:
    """What was observed during one module call: the input of discovery.

    Attributes:
        adds: one label for each add onto the call's own input, ``None`` if the branch does not come from it.
        joins: for each of these, whether its branch was computed before the previous add.
        attention: for each attention call, how many adds came before it, and its kind.
        softmaxes: for each softmax over the last axis, whether it is one of these.
        norms_at: for each norm of the stream or of a branch, how many adds came before it.
        ends_with_norm: whether the call ends with a final norm, or something else, that the skips inside do not go
            through.
        post_norm: whether a branch is added to a norm of the stream.
        fed_by: the calls that returned the exact tensor that this one received.
        is_lost: whether the stream was read together with a branch, and what came of it is not what was returned.
        inside: adds that are inside the branch of a later one, without a matrix of their own: their label is None.
        roles: for each add, how its branch responded when tokens were replaced; None if it did not.
        beside: what acts on tokens alone in a branch that mixes them, and is added inside in an unknown form.
    """

    name: str
    _module: weakref.ref[nn.Module]
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
    softmaxes: list[bool] = field(default_factory=list)
    final_norm: str | None = None
    fed_by: list[CallRecord] = field(default_factory=list)
    is_lost: bool = False
    inside: set[int] = field(default_factory=set)
    roles: list[Response | None] = field(default_factory=list)
    beside: str | None = None

    @property
    def module(self) -> nn.Module:
        """The module that was called."""
        module = self._module()
        assert module is not None  # discovery runs while the model is there
        return module

    @property
    def labels(self) -> list[Label]:
        """Labels of the genuine skip adds."""
        return [label for label in self.adds if label is not None]

    @property
    def keeps_shape(self) -> bool:
        """Whether the output has the shape of the input."""
        return self.output_shape == self.input_shape

    @property
    def is_numbered(self) -> bool:
        """Whether this is a call of a container's child, whose name is a number."""
        return _is_numbered(self.name)

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
    """A stream frame that also knows the recorded values of its stream, and what is added to them."""

    def __init__(self, entry: Tensor, record: CallRecord, strand: Strand, sums: Sums) -> None:
        super().__init__(entry, sums)
        self.record, self.strand = record, strand
        self.has_superseded = False
        self._branches: list[Branch] = []
        self._sums: list[Value] = []
        """What came of each add; a value that has none is a beginning of the stream no more."""
        self._onto_normed: list[bool] = []
        self._passed = 0

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

    def add(self, found: SkipSum, carried: Value, branch: Branch) -> Branch:
        """Record an add onto the stream that is about to run; returns the branch, as far as it is one of this stream.

        The adds that the branch was computed through and its stream was not are taken back: in
        ``x + f(h - h.mean(1))``, the difference was onto the stream as well, and is a part of the branch.
        """
        adds, joins = self.record.adds, self.record.joins
        # A branch computed before the previous add is parallel to it: x + attention(x), then + mlp(x).
        follows_a_skip = bool(adds) and adds[-1] is not None
        joins.append(follows_a_skip and branch.label is not None and not branch.is_new)
        adds.append(branch.label)
        self.record.roles.append(None)
        self._branches.append(branch)
        self._onto_normed.append(self.is_normed(found.carried))
        of_stream = self.strand.passed(self.strand.back_from([carried])[1])
        self._passed = branch.passed | of_stream | 1 << len(adds) - 1
        inside = branch.passed & ~of_stream
        taken = [number for number in range(len(adds)) if inside >> number & 1 and adds[number] is not None]
        for number in taken:
            adds[number] = self.record.roles[number] = None
            self.strand.begins.pop(self._sums[number], None)
            if not self._branches[number].is_mapped:
                self.record.inside.add(number)
        for number in range(len(adds) if inside else 0):
            before = [earlier for earlier in range(number) if adds[earlier] is not None]
            joins[number] &= bool(before) and not self._branches[number].passed >> before[-1] & 1
        return Branch(self.strand, branch.values, branch.seen) if taken else branch

    def added(self, out: Value) -> None:
        """The add that was recorded last has run."""
        self._sums.append(out)
        self.strand.follows.add(out)
        if self.record.adds[-1] is not None:
            self.strand.begin(out, self._passed)

    @property
    def adds_to_normed(self) -> bool:
        """Whether something is added to a norm of the stream, other than inside a branch."""
        known = enumerate(self._onto_normed)
        return any(normed and number not in self.record.inside for number, normed in known)


def probe(
    model: nn.Module,
    run: Callable[[], object],
    batch: int,
    stream: Stream | None = None,
    sums: Sums = "plain",
    long_skips: Mapping[int, LongSkips] | None = None,
    *,
    roles: bool = False,
) -> Pass:
    """Run the model once through ``run``, and follow it; the arguments are those of :class:`Pass`."""
    seen = Pass(batch, stream, sums, long_skips, roles=roles)
    with seen.on(model):
        run()
    return seen


class Pass(TorchFunctionMode):
    """One pass of a model that is followed. It keeps no module and no tensor alive, and may wait until it is asked for.

    Args:
        batch: number of sequences in the inputs.
        stream: how the stream is stored, if declared.
        sums: which forms of a sum are recognised.
        long_skips: look for long skips in the same pass, by the number under which the graph has them.
        recorder: records the operations.
        roles: whether branches are replayed to see which of them mix tokens; otherwise only attention counts as mixing.

    Attributes:
        records: one for each module call, in order of entry.
        called: how often each module was called, by name.
        without_stream: what modules in lists were called with that could not be a stream, by name.
        in_torch_func: the first module in a list that ran inside ``torch.func``; empty if none did.
    """

    def __init__(
        self,
        batch: int,
        stream: Stream | None = None,
        sums: Sums = "plain",
        long_skips: Mapping[int, LongSkips] | None = None,
        recorder: GraphRecorder | None = None,
        *,
        roles: bool = False,
    ) -> None:
        super().__init__()
        self.recorder = GraphRecorder() if recorder is None else recorder
        self.records: list[CallRecord] = []
        self._numbers: dict[int, int] = {}
        self._batch, self._stream, self._sums = batch, stream, sums
        self._long_skips = long_skips or {}
        self._roles = roles
        self.called = Counter[str]()
        self.without_stream: dict[str, str] = {}
        self.in_torch_func = ""
        self._frames: list[ProbeFrame] = []
        self._open: list[ProbeFrame | None] = []
        """For each running module its frame; None if it takes no stream."""
        self._seen = Seen()
        self._products = ByTensor[tuple[dict[tuple[Value, ...], None], bool]]()
        """For what was computed from products of activations, their factors, and whether no matrix acted since."""
        self._returned = ByTensor[list[CallRecord]]()

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Follow the pass of the model that runs inside this block."""
        # What a parametrization adds up is a weight, not a stream.
        lists = (module for module in model.modules() if isinstance(module, ParametrizationList))
        of_weights = {part for parametrizations in lists for part in parametrizations.modules()}
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if module in of_weights:
                    continue
                normalises = bool(name) and is_norm(module)  # the model itself is not one of its norms
                stack.callback(module.register_forward_pre_hook(self.enter(name, normalises), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self.leave(name, normalises), with_kwargs=True).remove)
            for context in (torch.no_grad(), self.recorder, self):
                stack.enter_context(context)
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in QUERIES:
            return func(*args, **kwargs)
        if func in _READS and self.recorder.keeps and isinstance(args[0], Tensor) and self.recorder.call is not None:
            self._seen.reads.append((self.recorder.value_of(args[0]), self.recorder.call))
        if not self._frames and not self._long_skips:
            with self.recorder.function(func):
                return func(*args, **kwargs)
        # Every active module call has a frame, from the model down to the innermost module; each one follows its own
        # input, because it is not yet known which of them are blocks.
        added = self._see_sums(func, args, kwargs) if func in SUMS or func in JOINS else []
        skips = [
            (self._numbers[id(frame.record)], len(frame.record.adds) - 1, self._terms(found)) for frame, found in added
        ]
        long_sums = {key: found.match(func, args, kwargs) for key, found in self._long_skips.items()}
        skips += [
            (key, len(self._long_skips[key].found) - 1, (found.carried,))
            for key, found in long_sums.items()
            if found is not None
        ]
        with self.recorder.function(func, skips):
            out = self._run(func, args, kwargs, tensors_in((args, kwargs), depth=3))
        for frame, found in added:
            number, add = self._numbers[id(frame.record)], len(frame.record.adds) - 1
            frame.added(self.recorder.value_of(out))
            if func in JOINS:
                frame.follow_joined(func, args, kwargs, out)
                continue
            frame.follow(out)
            self.recorder.note_stream(number, out, add)
            for long_skips in self._long_skips.values():
                long_skips.note_sum(number, add, found.carried, out)
        for key, long_skips in self._long_skips.items():
            long_skips.see(func, args, kwargs, out, long_sums[key])
        return out

    def _terms(self, found: SkipSum) -> tuple[Tensor, ...]:
        """The stream that a sum takes; if contents are recorded, also its two summands."""
        return (found.carried, *found.summands()) if self.recorder.keeps else (found.carried,)

    def _see_sums(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[tuple[ProbeFrame, SkipSum]]:
        """Record the adds that a call is, one for each frame to whose stream it adds something; it has not yet run."""
        added = []
        replayed: dict[object, Any] = {}
        for frame in self._frames:
            found = frame.match(func, args, kwargs) if func in frame.sums else None
            if found is None:
                continue
            added.append((frame, found))
            values = [self.recorder.value_of(tensor) for tensor in found.branches]
            branch = Branch(frame.strand, values, self._seen)
            branch = frame.add(found, self.recorder.value_of(found.carried), branch)
            if self._roles and branch.label is not None:
                added_value = self.recorder.value_of(found.summands()[1])
                with hidden():
                    role = branch.role(added_value, replayed)
                record = frame.record
                record.adds[-1], record.roles[-1] = role.label, role.response
                record.parallel_mlp = role.parallel_mlp or record.parallel_mlp
                record.beside = role.beside or record.beside
        return added

    def _run(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[Tensor]
    ) -> Any:
        before = self.recorder.value_of(inputs[0]) if func in NORMS else None
        if func == MULTI_HEAD:
            calls, out = _inside_multi_head(func, args, kwargs)
            are_shown = True
        else:
            out = func(*args, **kwargs)
            calls, are_shown = self._attention_calls(func, args, kwargs, out)
        # A call without a result, such as x[i] = y, has changed its first input.
        outputs = tensors_in(out) or inputs[:1]
        self._follow_products(func, inputs, outputs)
        for call in calls:
            attention = self._of_call(call)
            if attention is not None:
                self._seen.attention |= {self.recorder.value_of(tensor): attention for tensor in outputs}
        for frame in self._frames:
            number, strand, adds = self._numbers[id(frame.record)], frame.strand, len(frame.record.adds)
            frame.pass_on(func, args, out)
            made = frame.makes_one_stream(func, args, kwargs, out)
            if frame.is_stream(out):
                strand.follows.add(self.recorder.value_of(out))
                self.recorder.note_stream(number, out, adds - 1 if made else None)
            # A norm over tokens (GroupNorm) is a norm of the stream, and not a part of the branch that reads it.
            if made or (_norms_tokens(func, args) and frame.is_normed(out)):
                value = self.recorder.value_of(out)
                strand.begin(value, strand.passed(strand.back_from([value])[1]), is_new=made)
            if before is not None and strand.reaches(before):
                frame.record.norms_at.append(adds)
            counted = [are_shown and (call.weights is None or self._fits(call, frame)) for call in calls]
            for call, counts in zip(calls, counted, strict=True):
                if counts:
                    frame.record.attention.append((adds, self._kind(call, strand)))
            if func in SOFTMAXES and is_over_keys(args, kwargs):
                frame.record.softmaxes.append(any(counted))
        return out

    def _of_call(self, call: AttentionCall) -> Attention | None:
        products = self._products.get(call.scores)
        return of_call(call, self.recorder.value_of, () if products is None else (*products[0],))

    def _kind(self, call: AttentionCall, strand: Strand) -> Literal["attention", "cross_attention"]:
        attention = self._of_call(call)
        if attention is None:  # its keys are weights, which do not come from the stream
            assert call.query is not None
            return "cross_attention" if strand.reaches(self.recorder.value_of(call.query)) else "attention"
        return "cross_attention" if attention.crosses(strand) else "attention"

    def _follow_products(self, func: Callable[..., Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Pass on which products of activations a tensor was computed from: scores are one of queries and keys."""
        if func in CONSTANTS:
            return
        factors = [value for one in _factors(func, inputs) if not (value := self.recorder.value_of(one)).is_parameter]
        known = [found for one in inputs if (found := self._products.get(one)) is not None]
        if len(factors) > 1:
            now = {(*factors,): None}, True
        elif known:
            products = {factors: None for found, _ in known for factors in found}
            now = products, func not in MATRIX_PRODUCTS and any(is_direct for _, is_direct in known)
        else:
            return
        for tensor in outputs:
            self._products[tensor] = now

    def _attention_calls(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> tuple[list[AttentionCall], bool]:
        """The attention that a call is, if it is one, and whether its probabilities are shown there."""
        if func is SDPA:
            named = sdpa_arguments(args, kwargs)
            return [AttentionCall(query=named["query"], key=named["key"])], named["query"].dim() == 4
        if is_flex(func):
            return [AttentionCall(query=args[0], key=args[1])], True
        if func in SOFTMAXES and is_over_keys(args, kwargs):
            call = AttentionCall(weights=out, scores=args[0])
            if self._is_product(args[0]) or any(self._fits(call, frame) for frame in self._frames):
                return [call], True
        return [], False

    def _is_product(self, scores: Tensor) -> bool:
        found = self._products.get(scores)
        return found is not None and found[1]

    def _fits(self, call: AttentionCall, frame: ProbeFrame) -> bool:
        """Whether a softmax over the last axis is over keys, and between the tokens of a frame's stream.

        Its scores come from a product of queries and keys, or the last axis is as long as the stream, or one longer,
        with a sink: it is not over the features of a projection.
        """
        assert call.weights is not None
        assert call.scores is not None
        tokens, is_product = frame.tokens(self._batch, self._stream), self._is_product(call.scores)
        fits = is_attention_shaped(call.weights, self._batch, tokens) and (call.weights.dim() == 4 or is_product)
        return fits and (is_product or call.scores.shape[-1] - tokens in (0, 1))

    def enter(self, name: str, normalises: bool) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        """A pre-hook that opens a frame on the module's input."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._open:
                self.recorder.note_input((args, kwargs))
            entry = first_tensor(args, kwargs)
            self.called[name] += 1
            # A module that is given only ids has no stream, and opens no frame. It still takes a place in ``_open``,
            # because the hook on leaving takes one away.
            if entry is None:
                self.recorder.enter(name, normalises=normalises)
                self._open.append(None)
                if _is_numbered(name):
                    given = tensors_in((args, kwargs), depth=4)
                    kind = str(given[0].dtype).removeprefix("torch.") if given else ""
                    self.without_stream[name] = f"tensors of {kind}" if given else "no tensor"
                return
            if not self.in_torch_func and _is_numbered(name) and torch._C._functorch.is_functorch_wrapped_tensor(entry):
                self.in_torch_func = name
            self.recorder.keeps |= self._roles
            parent = next((frame.record for frame in reversed(self._open) if frame is not None), None)
            record = CallRecord(name, weakref.ref(module), parent, entry.shape, fed_by=self._givers_of(entry))
            number = self._numbers[id(record)] = len(self.records)
            self.recorder.enter(name, normalises=normalises, number=number, taken=entry)
            self.records.append(record)
            if self._roles:
                self.recorder.note_module(module, (args, kwargs))
            tokens = Tokens(entry.shape, self._batch, self._stream)
            strand = Strand(self.recorder.value_of(entry), number, self.recorder.graph.count, tokens)
            frame = ProbeFrame(entry, record, strand, self._sums)
            self._frames.append(frame)
            self._open.append(frame)
            for long_skips in self._long_skips.values():
                long_skips.enter(number, entry, frame)

        return hook

    def leave(self, name: str, normalises: bool) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        """A hook that closes the frame and records what the module returned."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            frame = self._open.pop()
            out, entry = output_tensor(output), first_tensor(args, kwargs)
            if out is not None and frame is not None and frame.is_stream(out):
                self.recorder.note_stream(self._numbers[id(frame.record)], out)
            is_product = name != "" and is_packed_linear(module)  # the model itself is no layer
            self.recorder.leave(out, entry if is_product else None, output)
            if out is not None:
                matrices = [one.dim() > 1 for one in module.parameters()]
                giver = Giver(name, bool(matrices), any(matrices), normalises)
                self._seen.givers.setdefault(self.recorder.value_of(out), []).append(giver)
            if frame is not None:
                self._close(frame, entry, out, name, normalises)

        return hook

    def _close(self, frame: ProbeFrame, entry: Tensor | None, out: Tensor | None, name: str, normalises: bool) -> None:
        record = frame.record
        self._frames.remove(frame)
        if out is not None:
            for long_skips in self._long_skips.values():
                long_skips.leave(self._numbers[id(record)], out)
            record.output_shape = out.shape
            record.post_norm = frame.adds_to_normed
            record.is_lost = frame.has_superseded and not frame.is_stream(out)
            # A final norm may be one that is not recognised (a tanh in its place), or a projection.
            after_sums = frame.is_normed(out) or not frame.is_stream(out)
            record.ends_with_norm = after_sums and not frame.adds_to_normed
            if normalises:
                self._note_norm(name, entry, out)
            self._returned[out] = [*self._givers_of(out), record]
        # What has ended is a block, or nothing is a block any more: what follows is computed from the stream alone.
        if self._roles and (not self._frames or record.is_complete or (record.is_numbered and _mixes_by_skip(record))):
            self.recorder.release()
            self.recorder.keeps = bool(self._frames)

    def _note_norm(self, name: str, x: Tensor | None, out: Tensor) -> None:
        if x is None:
            return
        for frame in self._frames:
            if frame.strand.reaches(self.recorder.value_of(x)):
                frame.record.norms_at.append(len(frame.record.adds))
            if frame.is_stream(x):
                frame.follow_normed(out)
                frame.strand.follows.add(self.recorder.value_of(out))
        for record in self._givers_of(x):
            record.final_norm = name

    def _givers_of(self, tensor: Tensor) -> list[CallRecord]:
        """The calls that returned this exact tensor."""
        return self._returned.get(tensor) or []


def _is_numbered(name: str) -> bool:
    return name.rpartition(".")[2].isdigit()


def _mixes_by_skip(record: CallRecord) -> bool:
    return bool({"attention", "mixer", "both"} & set(record.labels))


def _factors(func: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """What a product of matrices multiplies; ``baddbmm`` adds its first input."""
    if func not in PRODUCTS:
        return []
    return inputs[1:] if func in ADDED_MATRIX_PRODUCTS else inputs


def _norms_tokens(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a norm may be over several tokens."""
    over_axes = func in NORMS and len(args) > 1 and isinstance(args[1], Sequence) and len(args[1]) > 1
    return func is torch.nn.functional.group_norm or over_axes


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
