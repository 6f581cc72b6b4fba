"""Runs one small forward pass to see how a model is built.

Every module call opens a frame that follows its own input as if it were a residual stream. Frames record the
adds onto that stream, with a label for each branch, and the attention calls. Discovery then selects the
frames that are blocks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from rankscope.errors import SiteError
from rankscope.models.linear_maps import is_packed_linear
from rankscope.models.stream import Stream
from rankscope.models.view import Label, Response, Sums
from rankscope.models.wrapping import hidden
from rankscope.pass_graph.identity import ByTensor
from rankscope.pass_graph.ir import Graph
from rankscope.pass_graph.record import GraphRecorder
from rankscope.stream.attention_calls import (
    AttentionCall,
    inside_multi_head,
    is_attention_shaped,
    is_over_keys,
    sdpa_arguments,
)
from rankscope.stream.carries import KnownCall
from rankscope.stream.frames import (
    SkipSum,
    StreamFrame,
    first_tensor,
    output_tensor,
    tensors_in,
    with_another,
)
from rankscope.stream.observation import watch_lists
from rankscope.stream.operators import (
    ADDED_MATRIX_PRODUCTS,
    ADDS,
    CONSTANTS,
    JOINS,
    MULTI_HEAD,
    NORMS,
    PRODUCTS,
    PROJECTIONS,
    QUERIES,
    SDPA,
    SHAPED_LIKE,
    SOFTMAXES,
    SUMS,
    is_flex,
    is_norm,
    modes_asleep,
    some_mode_is_awake,
)
from rankscope.stream.roles import PASSES, TokenTrial, responses, silent_in
from rankscope.stream.states import LongSum, States

_MATRIX_PRODUCTS = (
    PRODUCTS | PROJECTIONS | ADDED_MATRIX_PRODUCTS | {torch.mm, Tensor.mm, torch.tensordot, SDPA, MULTI_HEAD}
)


class Ancestry(IntFlag):
    """Where the values of a tensor come from, relative to one frame.

    DERIVED: from the stream. ATTENTION, CROSS: through attention, cross-attention. OTHER: also through something else.
    FRESH: from the stream since its last add. MAPPED: through a product with a matrix. SELF: through a product of two
    tensors, both from the stream, since the last product. MIXED: through a sum inside, whose branch mixes tokens.
    """

    NONE = 0
    DERIVED = 1
    ATTENTION = 2
    CROSS = 4
    OTHER = 8
    FRESH = 16
    MAPPED = 32
    SELF = 64
    MIXED = 128


_ROUNDINGS = 64


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
        occurrence: how many calls of the same module came before.
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
    occurrence: int = 0

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
    def responses_of_skips(self) -> list[Response | None]:
        """The responses of the genuine skip adds: which of them mix tokens is unknown where there was none."""
        return [role for label, role in zip(self.adds, self.roles, strict=True) if label is not None]

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


class _Part(NamedTuple):
    """A summand of a branch: where it was compared, the module that returned it, and whether weights acted on it."""

    place: Hashable
    module: str | None
    is_mapped: bool


class ProbeFrame(StreamFrame):
    """A stream frame that also tracks where every other tensor of the call comes from."""

    def __init__(self, entry: Tensor, record: CallRecord, sums: Sums = "plain") -> None:
        self._newest = ByTensor[None]()
        super().__init__(entry, sums)
        self.record = record
        self.sum: SkipSum | None = None
        self.parts: list[list[tuple[_Part, _Part]]] = [[]]
        """For each add, the sums of two derived tensors since the add before."""
        self.operations = 0
        """Other operations that were given two derived tensors."""
        self.has_superseded = False
        self.joined: Tensor | None = None
        self._ancestries = ByTensor[Ancestry]()
        self._through = ByTensor[int]()
        """The adds of this frame through which a tensor was computed, as bits."""
        self._branches: list[tuple[int, bool]] = []
        """For each add, the adds through which its branch was computed, and whether a matrix acted on the branch."""
        self._onto_normed: list[bool] = []

    @property
    def key(self) -> Hashable:
        """Identifies the module call in every pass."""
        return self.record.name, self.record.occurrence

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
        known = self._ancestries.get(tensor) or Ancestry.NONE
        if self.is_stream(tensor):
            fresh = Ancestry.FRESH if tensor in self._newest else Ancestry.NONE
            return Ancestry.DERIVED | fresh | known & Ancestry.MIXED
        return known

    def mark(self, tensor: Tensor, ancestry: Ancestry) -> None:
        """Set the ancestry of a tensor."""
        self._ancestries[tensor] = ancestry

    def see_attention(self, call: AttentionCall, outputs: Sequence[Tensor], *, counts: bool) -> None:
        """Record attention. It is cross-attention if its queries come from the stream, and its keys do not.

        ``counts`` is False for attention whose probabilities are not shown, or between tokens other than those of this
        frame's stream.
        """
        if call.scores is not None:
            own = self.ancestry(call.scores)
            crosses = bool(own & Ancestry.DERIVED) and not own & Ancestry.SELF
        else:
            assert call.query is not None
            assert call.key is not None
            crosses = bool(self.ancestry(call.query)) and not self.ancestry(call.key)
        if counts:
            self.record.attention.append((len(self.record.adds), "cross_attention" if crosses else "attention"))
        marks = Ancestry.DERIVED | Ancestry.ATTENTION | (Ancestry.CROSS if crosses else Ancestry.NONE)
        for tensor in outputs:
            if not self.is_stream(tensor):
                self.mark(tensor, self.ancestry(tensor) | marks)

    def see_add(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Record an add onto the stream, if this is one; returns the tensor that is the stream."""
        skip_sum = self.match(func, args, kwargs) if func in self.sums else None
        if skip_sum is None:
            return None
        follows_a_skip = bool(self.record.adds) and self.record.adds[-1] is not None
        ancestry = Ancestry.NONE
        for tensor in skip_sum.branches:
            ancestry |= self.ancestry(tensor)
        label = self._label(ancestry)
        # A branch computed before the previous add is parallel to it: x + attention(x), then + mlp(x).
        stale = label is not None and not ancestry & Ancestry.FRESH
        self.record.adds.append(label)
        self.record.joins.append(follows_a_skip and stale)
        self._find_inside(skip_sum, bool(ancestry & Ancestry.MAPPED))
        self._age()
        self._onto_normed.append(self.is_normed(skip_sum.carried))
        self.sum = skip_sum
        self.parts.append([])
        return skip_sum.carried

    @property
    def adds_to_normed(self) -> bool:
        """Whether something is added to a norm of the stream, other than inside a branch."""
        known = enumerate(self._onto_normed)
        return any(normed and number not in self.record.inside for number, normed in known)

    def _find_inside(self, found: SkipSum, is_mapped: bool) -> None:
        """Take back the adds that the branch of this one was computed through and its stream was not.

        ``x + f(h - h.mean(1))``: the difference was onto the stream as well, and is a part of the branch.
        """
        through = self._bits(found.branches)
        self._branches.append((through, is_mapped))
        inside = through & ~self._bits([found.carried])
        adds, joins = self.record.adds, self.record.joins
        for number in (number for number in range(len(adds)) if inside >> number & 1 and adds[number] is not None):
            adds[number] = None
            if not self._branches[number][1]:
                self.record.inside.add(number)
        for number in range(len(adds) if inside else 0):
            before = [earlier for earlier in range(number) if adds[earlier] is not None]
            joins[number] &= bool(before) and not self._branches[number][0] >> before[-1] & 1

    def note_sum(self, out: Tensor) -> None:
        """The add that was recorded last has run."""
        self._through[out] = self._bits([out]) | 1 << len(self.record.adds) - 1

    def _bits(self, tensors: Iterable[Tensor]) -> int:
        bits = 0
        for tensor in tensors:
            bits |= self._through.get(tensor) or 0
        return bits

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
        return "mlp"  # unless the experiment shows that it mixes tokens

    def spread(
        self, func: Callable[..., Any], inputs: list[Tensor], outputs: list[Tensor], factors: Sequence[Tensor]
    ) -> None:
        """Pass ancestries on from the inputs of a call to its outputs.

        ``factors`` are the activations that are multiplied, if this is a product of matrices, and weights are not.
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
        through = self._bits(inputs)
        for tensor in outputs if through else ():
            self._through[tensor] = through
        if func in _MATRIX_PRODUCTS:
            union |= Ancestry.MAPPED
        if len(factors) > 1:
            both = all(self.ancestry(factor) for factor in factors)
            union = union | Ancestry.SELF if both else union & ~Ancestry.SELF
        # A parallel block adds attention(x) + mlp(x) first and the sum to the stream afterwards.
        if func in ADDS and len(ancestries) == 2:
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
    *,
    roles: bool = False,
    settled: Sequence[CallRecord] = (),
    begun: ReferencePass | None = None,
) -> tuple[list[CallRecord], Graph]:
    """Run the model once through ``run``: a record of each module call, in order of entry, and all operations.

    ``long_skips`` look for long skips in the same pass, by the number under which the graph has them. With
    ``roles``, it runs a few times more to see which branches mix tokens; otherwise only attention counts as mixing.
    ``settled`` are the calls of an earlier probe that recognised fewer forms of sums: if there are no more adds now,
    their labels hold. ``begun`` is the first pass, if it has run before.
    """
    if roles and some_mode_is_awake():
        # Under surgery the stream is not what the block made of its input, so roles are those of the model as written.
        mode = _Probe(batch, stream, sums, long_skips or {}, None)
        _run_under(model, run, mode, mode.recorder)
        with modes_asleep():
            written = probe(model, run, batch, stream, sums, roles=True)[0]
        _take_roles(mode.records, written)
        return mode.records, mode.recorder.graph
    if begun is not None:
        mode, trial = begun.mode, begun.mode.trial
    else:
        trial = TokenTrial(batch, stream) if roles else None
        mode = _Probe(batch, stream, sums, long_skips or {}, trial)
        _run_under(model, run, mode, mode.recorder)
    if trial is not None and settled and _places(settled) == _places(mode.records):
        _take_roles(mode.records, settled)
    elif trial is not None:
        _find_roles(mode.records, mode, lambda again: _run_under(model, run, again), trial)
        zeros = silent_in(model) if any(None in record.responses_of_skips for record in mode.records) else {}
        if zeros:
            # A branch times a gain of zero, as at the start of training, shows nothing: once more with other numbers.
            with _reparametrize_module(model, zeros, tie_weights=True):
                trial = TokenTrial(batch, stream)
                other = _Probe(batch, stream, sums, {}, trial)
                _run_under(model, run, other)
                _find_roles(mode.records, other, lambda again: _run_under(model, run, again), trial)
    return mode.records, mode.recorder.graph


def _places(records: Sequence[CallRecord]) -> list[tuple[str, int]]:
    return [(record.name, len(record.adds)) for record in records]


def _take_roles(records: Sequence[CallRecord], written: Sequence[CallRecord]) -> None:
    """Give each call the labels and responses of the same call of the model as written, if it has as many adds."""
    by_call = {(record.name, record.occurrence): record for record in written}
    for record in records:
        other = by_call.get((record.name, record.occurrence))
        if other is not None and len(other.adds) == len(record.adds):
            record.adds, record.roles = other.adds, other.roles
            record.parallel_mlp, record.beside = other.parallel_mlp, other.beside


def _find_roles(
    records: Sequence[CallRecord], reference: _Probe, run: Callable[[_Probe], None], trial: TokenTrial
) -> None:
    others: list[_Probe] = []
    for number in range(PASSES if trial.kept else 0):
        others.append(reference.again(trial.next(number), [one.trial for one in others if one.trial is not None]))
        run(others[-1])
    for record in records:
        _settle(record, reference, others)


class ReferencePass:
    """The first pass of a probe that finds plain sums and roles, together with an observation of likely blocks.

    Args:
        model: the model.
        batch: number of sequences in its inputs.
        stream: how the stream is stored, if declared.

    It keeps no module alive, and may wait for the passes that are compared with it.
    """

    def __init__(self, model: nn.Module, batch: int, stream: Stream | None = None) -> None:
        self.mode = _Probe(batch, stream, "plain", {}, TokenTrial(batch, stream))
        self.watch = watch_lists(dict(model.named_modules()))

    @property
    def bytes_kept(self) -> int:
        """Size of the tensors that later passes are compared with."""
        trial = self.mode.trial
        return 0 if trial is None else sum(value.numel() * value.element_size() for value in trial.kept.values())

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Follow the pass of the model that runs inside this block."""
        with _following(model, self.mode, self.mode.recorder), self.watch.on(dict(model.named_modules())):
            yield


def record(model: nn.Module, run: Callable[[], object], batch: int, sums: Sums, recorder: GraphRecorder) -> None:
    """Run the model once, and record its operations, its module calls, and the sums in them."""
    _run_under(model, run, _Probe(batch, None, sums, {}, recorder=recorder), recorder)


def _run_under(
    model: nn.Module, run: Callable[[], object], mode: _Probe, recorder: GraphRecorder | None = None
) -> None:
    with _following(model, mode, recorder):
        run()


@contextmanager
def _following(model: nn.Module, mode: _Probe, recorder: GraphRecorder | None) -> Iterator[None]:
    # What a parametrization adds up is a weight, not a stream.
    lists = (module for module in model.modules() if isinstance(module, ParametrizationList))
    of_weights = {part for parametrizations in lists for part in parametrizations.modules()}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if module in of_weights:
                continue
            normalises = bool(name) and is_norm(module)  # the model itself is not one of its norms
            stack.callback(module.register_forward_pre_hook(mode.enter(name, normalises), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(mode.leave(name, normalises), with_kwargs=True).remove)
        stack.enter_context(torch.no_grad())
        if recorder is not None:
            stack.enter_context(recorder)
        stack.enter_context(mode)
        yield


def _settle(record: CallRecord, reference: _Probe, others: Sequence[_Probe]) -> None:
    """The labels of a call, from how its branches responded when tokens were replaced."""
    trials = [other.trial for other in others if other.trial is not None]
    key = record.name, record.occurrence
    parts = reference.parts.get(key, [])
    record.roles = record.roles or [None] * len(record.adds)
    for number, label in enumerate(record.adds):
        response = responses(trials, (key, "branch", number))
        if response is not None and any((key, number) in other.mixed for other in others):
            response = "mixes"
        if response is None:
            continue
        record.roles[number] = response
        joined = _compared(trials, parts[number : number + 1])
        beside = _alone(joined)
        if label == "both" and not beside:
            # Of several parts that mix tokens: two branches of the block, or values that are convolved in a module.
            seen = joined or _compared(trials, reference.parts_inside(record))
            if not _alone(seen) and any(found.keys() == {"mixes"} for found in seen):
                record.adds[number] = "attention"
        elif label == "mlp" and response == "mixes":
            record.adds[number] = "both" if beside else "mixer"
        elif label == "attention" and response == "alone":
            record.adds[number] = "mlp"
        if label == "both" or beside:
            record.parallel_mlp = beside.pop() if len(beside) == 1 else None
        alone = [name for other in others for name in sorted(other.joined.get((key, number), ()))]
        if record.adds[number] is not None and alone:
            record.beside = alone[0]


def _compared(trials: list[TokenTrial], parts: Iterable[list[tuple[_Part, _Part]]]) -> list[dict[Any, _Part]]:
    """The summands of each sum, by how they responded."""
    return [{responses(trials, part.place): part for part in pair} for pairs in parts for pair in pairs]


def _alone(joined: Iterable[dict[Any, _Part]]) -> set[str | None]:
    """The modules that act on tokens alone and whose results are added to what mixes them."""
    pairs = [found for found in joined if found.keys() == {"mixes", "alone"}]
    return {found["alone"].module for found in pairs if found["alone"].is_mapped}


class _Probe(TorchFunctionMode):
    def __init__(
        self,
        batch: int,
        stream: Stream | None,
        sums: Sums,
        long_skips: Mapping[int, LongSkips],
        trial: TokenTrial | None = None,
        recorder: GraphRecorder | None = None,
    ) -> None:
        super().__init__()
        self.trial = trial
        self.known: dict[Hashable, list[Label | None]] = {}
        """The labels of each call in the reference pass, for the passes that are compared with it."""
        self._idle: frozenset[Hashable] = frozenset()
        """The calls that add nothing to their input there, and no two branches to each other."""
        self.mixed: set[tuple[Hashable, int]] = set()
        """Adds whose branch went through a sum inside that mixes tokens: module call and number."""
        self.parts: dict[Hashable, list[list[tuple[_Part, _Part]]]] = {}
        self._occurrences = Counter[str]()
        self._stream = stream
        self._long_skips = long_skips
        self.recorder = GraphRecorder() if recorder is None else recorder
        self._sums = sums
        self.records: list[CallRecord] = []
        self.numbers: dict[int, int] = {}
        self._batch = batch
        self._frames: list[ProbeFrame] = []
        self._open: list[ProbeFrame | Literal["adds nothing"] | None] = []
        """For each running module its frame; None if it takes no stream. In passes that are compared with the reference
        pass, calls that add nothing to their input have no frame."""
        self._products = ByTensor[None]()
        self._returned = ByTensor[list[CallRecord]]()
        self._modules = ByTensor[str]()
        """The last module with a matrix from whose output a tensor was computed."""
        self._earlier: Sequence[TokenTrial] = ()
        self._joined = ByTensor[frozenset[str]]()
        self.joined: dict[tuple[Hashable, int], frozenset[str]] = {}
        """For each branch, what acts on tokens alone and is added inside, in another form, to what mixes them."""

    def again(self, trial: TokenTrial, earlier: Sequence[TokenTrial] = ()) -> _Probe:
        """A mode for another pass with the same settings; the last one is given all ``earlier`` trials."""
        probe = _Probe(self._batch, self._stream, self._sums, {}, trial)
        probe.known = {(record.name, record.occurrence): record.adds for record in self.records}
        idle = {key for key, adds in probe.known.items() if not any(adds) and not any(self.parts.get(key, ()))}
        probe._idle = frozenset(idle)
        probe._earlier = earlier
        return probe

    def parts_inside(self, record: CallRecord) -> list[list[tuple[_Part, _Part]]]:
        """The sums of two branches in the modules that a call has called."""
        inside = {id(record)}
        for other in self.records:  # in order of entry
            if id(other.parent) in inside:
                inside.add(id(other))
        calls = [other for other in self.records if id(other) in inside and other is not record]
        return [pairs for other in calls for pairs in self.parts.get((other.name, other.occurrence), ())]

    def _is_skip(self, frame: ProbeFrame) -> bool:
        """Whether the add that was recorded last adds a branch to the stream, as far as is known."""
        number = len(frame.record.adds) - 1
        known = self.known.get(frame.key, frame.record.adds)
        return number < len(known) and known[number] is not None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in QUERIES:
            return func(*args, **kwargs)
        if not self._frames and not self._long_skips:
            with self.recorder.function(func):
                return func(*args, **kwargs)
        # Every active module call has a frame, from the model down to the innermost module; each one follows its own
        # input, because it is not yet known which of them are blocks.
        is_sum = func in SUMS or func in JOINS
        added = [frame.see_add(func, args, kwargs) for frame in self._frames] if is_sum else []
        mixing = self._see_branches(added)
        inputs = tensors_in((args, kwargs), depth=3)
        skips = [
            (self.numbers[id(frame.record)], len(frame.record.adds) - 1, self._added(frame, stream))
            for frame, stream in zip(self._frames, added, strict=False)
            if stream is not None
        ]
        long_sums = {key: found.match(func, args, kwargs) for key, found in self._long_skips.items()}
        skips += [
            (key, len(self._long_skips[key].found) - 1, (found.carried,))
            for key, found in long_sums.items()
            if found is not None
        ]
        with self.recorder.function(func, skips):
            out = self._run(func, args, kwargs, inputs)
        if func not in JOINS:
            self._restart(added, out, mixing)
        for frame, stream in zip(self._frames, added, strict=False):
            frame.sum = None
            if stream is not None:
                frame.note_sum(out)
            if stream is not None and func in JOINS:
                frame.follow_joined(func, args, kwargs, out)
            elif stream is not None:
                frame.follow(out)
                self.recorder.note_stream(self.numbers[id(frame.record)], out, len(frame.record.adds) - 1)
                for found in self._long_skips.values():
                    found.note_sum(self.numbers[id(frame.record)], len(frame.record.adds) - 1, stream, out)
        for key, found in self._long_skips.items():
            found.see(func, args, kwargs, out, long_sums[key])
        return out

    def _added(self, frame: ProbeFrame, stream: Tensor) -> tuple[Tensor, ...]:
        """The stream that a sum takes; if contents are recorded, also its two summands."""
        assert frame.sum is not None
        return (stream, *frame.sum.summands()) if self.recorder.keeps else (stream,)

    def _run(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[Tensor]
    ) -> Any:
        joined: frozenset[str] = frozenset()
        if func in ADDS and self._open:
            self._see_parts(func, inputs)  # before the call: it may write to one of them
        elif self._open and self.trial is not None and len(inputs) > 1:
            joined = self._see_joined(func, args, kwargs, inputs)
        if func == MULTI_HEAD:
            calls, out = _inside_multi_head(func, args, kwargs)
            are_shown = True
        else:
            out = func(*args, **kwargs)
            calls, are_shown = self._attention_calls(func, args, kwargs, out)
        # A call without a result, such as x[i] = y, has changed its first input.
        outputs = tensors_in(out) or inputs[:1]
        factors = [one for one in _factors(func, inputs) if not self.recorder.value_of(one).is_parameter]
        if len(factors) > 1 or (func not in _MATRIX_PRODUCTS and any(tensor in self._products for tensor in inputs)):
            for tensor in outputs:
                self._products[tensor] = None
        self._pass_on_joined(func, inputs, outputs, joined)
        for frame in self._frames:
            frame.spread(func, inputs, outputs, factors)
            frame.pass_on(func, args, out)
            if frame.is_stream(out):
                self.recorder.note_stream(self.numbers[id(frame.record)], out)
            if frame.makes_one_stream(func, args, kwargs, out):
                self.recorder.note_stream(self.numbers[id(frame.record)], out, len(frame.record.adds) - 1)
                self._reset(frame, ("made", len(frame.record.adds)), out)
            if _norms_tokens(func, args) and frame.is_normed(out):
                # A norm over tokens (GroupNorm) is a norm of the stream, and not a part of the branch that reads it.
                self._reset(frame, ("norm", len(frame.record.adds), len(frame.record.norms_at)), out)
            if func in NORMS and frame.ancestry(inputs[0]):
                frame.record.norms_at.append(len(frame.record.adds))
            if frame.joined is not None:
                frame.record.parallel_mlp = self._weighty_giver_of(frame.joined)
                frame.joined = None
            counted = [are_shown and (call.weights is None or self._fits(call, frame)) for call in calls]
            for call, counts in zip(calls, counted, strict=True):
                # Keys that are weights are a memory, which every token reads alone, as an MLP.
                is_memory = call.key is not None and self.recorder.value_of(call.key).is_parameter
                frame.see_attention(call, [] if is_memory else outputs, counts=counts)
            if func in SOFTMAXES and is_over_keys(args, kwargs):
                frame.record.softmaxes.append(any(counted))
        return out

    def _see_branches(self, added: Sequence[Tensor | None]) -> list[ProbeFrame]:
        """Keep or compare what is added to the stream of each frame; returns the frames in which it mixes tokens."""
        mixing: list[ProbeFrame] = []
        if self.trial is None:
            return mixing
        for frame, stream in zip(self._frames, added, strict=False):
            number = len(frame.record.adds) - 1
            if stream is None or frame.sum is None or not self._is_skip(frame):
                continue
            place = frame.key, "branch", number
            self.trial.see(place, frame.sum.summands()[1], frame.entry_shape)
            found = [self._joined.get(branch) or frozenset() for branch in frame.sum.branches]
            self.joined[frame.key, number] = frozenset[str]().union(*found)
            if any(frame.ancestry(tensor) & Ancestry.MIXED for tensor in frame.sum.branches):
                self.mixed.add((frame.key, number))
                mixing.append(frame)
            elif self.trial.changed.get(place, (False, False))[1]:
                mixing.append(frame)
        return mixing

    def _pass_on_joined(
        self, func: Callable[..., Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor], joined: frozenset[str]
    ) -> None:
        if self.trial is None:
            return
        if func in _MATRIX_PRODUCTS and any(isinstance(one, nn.Parameter) and one.dim() > 1 for one in inputs):
            return
        modules = {name for tensor in inputs if (name := self._modules.get(tensor)) is not None}
        for tensor in inputs:
            joined |= self._joined.get(tensor) or frozenset()
        for tensor in outputs:
            if len(modules) == 1:
                self._modules[tensor] = next(iter(modules))
            if joined:
                self._joined[tensor] = joined

    def _restart(self, added: Sequence[Tensor | None], out: Tensor, mixing: Sequence[ProbeFrame]) -> None:
        """After a sum, every branch that follows is tested from the stream of the reference pass on."""
        if self.trial is None:
            return
        known = zip(self._frames, added, strict=False)
        restarted = [frame for frame, stream in known if stream is not None and self._is_skip(frame)]
        for frame in restarted:
            self._reset(frame, ("sum", len(frame.record.adds) - 1), out)
        if mixing:
            for frame in self._frames:
                if frame not in restarted and not frame.is_stream(out):
                    frame.mark(out, frame.ancestry(out) | Ancestry.MIXED)

    def _reset(self, frame: ProbeFrame, place: tuple[Hashable, ...], out: Tensor) -> None:
        """Keep the stream at a place, or put it back there with some tokens replaced; ``out`` is a new tensor."""
        if self.trial is None:
            return
        if self.trial.is_reference:
            self.trial.see((frame.key, *place), out, frame.entry_shape)
            return
        new = self.trial.with_other_tokens((frame.key, *place), frame.entry_shape)
        if new is not None and new.shape == out.shape:
            with torch._C.DisableTorchFunction():
                out.copy_(new)
            frame.mark(out, frame.ancestry(out) & ~Ancestry.MIXED)

    def _see_parts(self, func: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        """Keep or compare the two summands of a branch: token mixing and an MLP may be added to each other first."""
        frame = next((one for one in reversed(self._open) if one is not None), None)
        if self.trial is None or not isinstance(frame, ProbeFrame) or len(inputs) != 2:
            return
        if any(map(frame.is_stream, inputs)):
            return
        ancestries = [frame.ancestry(tensor) for tensor in inputs]
        # Not all: what was computed by another library cannot be followed, but it responds.
        if not any(ancestries) or not all(self.trial.can_see(tensor, frame.entry_shape) for tensor in inputs):
            return
        one, other = (
            _Part(
                (frame.key, "part", len(frame.parts), len(frame.parts[-1]), side),
                self._weighty_giver_of(tensor),
                bool(ancestries[side] & Ancestry.MAPPED) or self._is_of_a_module(tensor),
            )
            for side, tensor in enumerate(inputs)
        )
        for part, tensor in zip((one, other), inputs, strict=True):
            self.trial.see(part.place, tensor, frame.entry_shape, is_part=True)
        frame.parts[-1].append((one, other))

    def _see_joined(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]
    ) -> frozenset[str]:
        """What acts on tokens alone and is added to what mixes them by an operation other than a plain sum.

        What the operation is given is kept or compared. In the last pass, if one of its inputs mixes tokens and another
        does not, it is tried whether it is a sum of the two: see :func:`_adds`.
        """
        frame = next((one for one in reversed(self._open) if one is not None), None)
        if self.trial is None or not isinstance(frame, ProbeFrame) or any(map(frame.is_stream, inputs)):
            return frozenset()
        seen = [one for one in inputs if frame.ancestry(one) and self.trial.can_see(one, frame.entry_shape)]
        if len(seen) < 2:
            return frozenset()
        places = [(frame.key, "joined", frame.operations, side) for side in range(len(seen))]
        frame.operations += 1
        for place, tensor in zip(places, seen, strict=True):
            self.trial.see(place, tensor, frame.entry_shape, is_part=True)
        if self.trial.number != PASSES - 1:
            return frozenset()
        trials = [*self._earlier, self.trial]
        given = {responses(trials, place): tensor for place, tensor in zip(places, seen, strict=True)}
        mixing, alone = given.get("mixes"), given.get("alone")
        is_mapped = alone is not None and (frame.ancestry(alone) & Ancestry.MAPPED or alone in self._modules)
        if mixing is None or alone is None or not is_mapped or not _adds(func, (args, kwargs), mixing, alone):
            return frozenset()
        return frozenset({self._modules.get(alone) or "its own forward"})

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
            if args[0] in self._products or any(self._fits(call, frame) for frame in self._frames):
                return [call], True
        return [], False

    def _fits(self, call: AttentionCall, frame: ProbeFrame) -> bool:
        """Whether a softmax over the last axis is over keys, and between the tokens of a frame's stream.

        Its scores come from a product of queries and keys, or the last axis is as long as the stream, or one longer,
        with a sink: it is not over the features of a projection.
        """
        assert call.weights is not None
        assert call.scores is not None
        tokens, is_product = frame.tokens(self._batch, self._stream), call.scores in self._products
        fits = is_attention_shaped(call.weights, self._batch, tokens) and (call.weights.dim() == 4 or is_product)
        return fits and (is_product or call.scores.shape[-1] - tokens in (0, 1))

    def enter(
        self, name: str, normalises: bool
    ) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]:
        """A pre-hook that opens a frame on the module's input."""

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if not self._open:
                self.recorder.note_input((args, kwargs))
            entry, given = first_tensor(args, kwargs), None
            occurrence = self._occurrences[name]
            self._occurrences[name] += 1
            if (name, occurrence) in self._idle:
                self._open.append("adds nothing")
                self.recorder.enter(name, normalises=normalises)
                return None
            if entry is not None:
                entry, given = self._entered((name, occurrence), entry, args, kwargs)
            opened: ProbeFrame | None = None
            # A module that is given only ids has no stream, and opens no frame. It still takes a place in ``_open``,
            # because the hook on leaving takes one away.
            if entry is not None:
                parent = next((f.record for f in reversed(self._open) if isinstance(f, ProbeFrame)), None)
                record = CallRecord(
                    name, weakref.ref(module), parent, entry.shape, fed_by=self._givers_of(entry), occurrence=occurrence
                )
                self.numbers[id(record)] = len(self.records)
                self.recorder.enter(name, normalises=normalises, number=len(self.records), taken=entry)
                self.records.append(record)
                opened = ProbeFrame(entry, record, self._sums)
                self._frames.append(opened)
                for long_skips in self._long_skips.values():
                    long_skips.enter(self.numbers[id(record)], entry, opened)
            else:
                self.recorder.enter(name, normalises=normalises)
            self._open.append(opened)
            return given

        return hook

    def _entered(
        self, key: Hashable, entry: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, tuple[tuple[Any, ...], dict[str, Any]] | None]:
        """Keep the input of a module call, or replace some of its tokens; returns it, and new arguments if replaced."""
        if self.trial is None:
            return entry, None
        place = key, "entry"
        self.trial.see(place, entry, entry.shape)
        new = None if self.trial.is_reference else self.trial.with_other_tokens(place, entry.shape)
        if new is None or new.shape != entry.shape:
            return entry, None
        mixed = Ancestry.MIXED if self.trial.changed.get(place, (False, False))[1] else Ancestry.NONE
        for outer in self._frames:
            if outer.is_stream(entry):
                outer.follow_normed(new) if outer.is_normed(entry) else outer.follow(new)
            else:
                outer.mark(new, outer.ancestry(entry) | mixed)
        return new, with_another((args, kwargs), entry, new)

    def leave(self, name: str, normalises: bool) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        """A hook that closes the frame and records what the module returned."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            frame = self._open.pop()
            out, entry = output_tensor(output), first_tensor(args, kwargs)
            if out is not None and isinstance(frame, ProbeFrame) and frame.is_stream(out):
                self.recorder.note_stream(self.numbers[id(frame.record)], out)
            is_product = name != "" and is_packed_linear(module)  # the model itself is no layer
            self.recorder.leave(out, product_of=entry if is_product else None)
            if isinstance(frame, ProbeFrame):
                self._frames.remove(frame)
                self._forget(frame)
                if out is not None:
                    for long_skips in self._long_skips.values():
                        long_skips.leave(self.numbers[id(frame.record)], out)
                    frame.record.output_shape = out.shape
                    frame.record.post_norm = frame.adds_to_normed
                    frame.record.is_lost = frame.has_superseded and not frame.is_stream(out)
                    # A final norm may be one that is not recognised (a tanh in its place), or a projection.
                    after_sums = frame.is_normed(out) or not frame.is_stream(out)
                    frame.record.ends_with_norm = after_sums and not frame.adds_to_normed
                    if normalises:
                        self._note_norm(name, entry, out)
                    self._returned[out] = [*self._givers_of(out), frame.record]
            elif frame == "adds nothing" and normalises and out is not None:
                self._note_norm(name, entry, out)
            if out is not None and not normalises and any(one.dim() > 1 for one in module.parameters()):
                self._modules[out] = name
                self._joined[out] = frozenset()  # what is put together inside a module that mixes tokens is its own

        return hook

    def _forget(self, frame: ProbeFrame) -> None:
        """A call without adds has no branches to test, so its input is not needed."""
        self.parts[frame.key] = frame.parts
        if self.trial is not None and self.trial.is_reference and not frame.record.labels:
            self.trial.kept.pop((frame.key, "entry"), None)

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

    def _is_of_a_module(self, tensor: Tensor) -> bool:
        """Whether a module with weights returned this tensor, other than a norm: it may act entry by entry."""
        givers = [record for record in self._givers_of(tensor) if any(True for _ in record.module.parameters())]
        return bool(givers) and not is_norm(givers[0].module)

    def _givers_of(self, tensor: Tensor) -> list[CallRecord]:
        """The calls that returned this exact tensor."""
        return self._returned.get(tensor) or []


def _adds(func: Callable[..., Any], given: Any, one: Tensor, other: Tensor) -> bool:
    """Whether what an operation makes of one input does not depend on the other; True if it cannot be tried.

    A product of the two, as of a gate or of attention weights and values, does.
    """
    if isinstance(func, HigherOrderOperator):
        return not is_flex(func)

    def result(moved_one: Tensor, moved_other: Tensor) -> Tensor:
        copies = pytree.tree_map_only(
            Tensor, Tensor.clone, with_another(with_another(given, one, moved_one), other, moved_other)
        )
        out = tensors_in(func(*copies[0], **copies[1])) or tensors_in(copies)[:1]
        return torch.cat([tensor.flatten().double() for tensor in out if tensor.is_floating_point()])

    with hidden():
        others = other, other * 2
        try:
            plain, changed = (result(one, value) for value in others)
            elsewhere, changed_elsewhere = (result(one + one.std(), value) for value in others)
        except (RuntimeError, ValueError, TypeError):
            return True
        change = changed - plain
        size = max(float(tensor.abs().max()) for tensor in (plain, changed, elsewhere, changed_elsewhere))
        rounding = _ROUNDINGS * torch.finfo(other.dtype).eps * size
        return float(change.abs().max()) > rounding >= float((changed_elsewhere - elsewhere - change).abs().max())


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
