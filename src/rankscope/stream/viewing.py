"""Finds the structure of a model on a small part of the inputs on which it will be measured."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rankscope.errors import DiscoveryError, LayoutError, PaddedInputError, RankscopeError, UnsupportedConfigError
from rankscope.models.inputs import Batch
from rankscope.models.inputs.axes import FIRST_SEQUENCE, ONE_TOKEN, observe_experiments
from rankscope.models.inputs.given import digest_of
from rankscope.models.linear_maps import adapters_merged, has_adapter
from rankscope.models.loading.devices import have_drawn, seed_generators
from rankscope.models.stream import Stream
from rankscope.models.unchanged import Snapshot
from rankscope.models.view import BlockCall, BlockPlan, ModelView, Stack
from rankscope.models.wrapping import hidden, needs_all_ranks, once_more_uncompiled, resharded, uncompiled
from rankscope.stream.cuts import with_leaks
from rankscope.stream.discovery import discover, with_streams
from rankscope.stream.evidence import Known, agreed, shows_streams
from rankscope.stream.frames import tensors_in
from rankscope.stream.mixing import adds_only
from rankscope.stream.observation import Ends, FirstCalls, is_data, named_inputs, watch_lists
from rankscope.stream.operators import modes_asleep, some_mode_is_awake
from rankscope.stream.own_tokens import PROBE_TOKENS, counted
from rankscope.stream.passes import Pass

# Views of one model that are remembered, by what it was run on; a snapshot holds a fact of every tensor.
_REMEMBERED = 4
_VIEWS: WeakKeyDictionary[nn.Module, dict[object, tuple[Snapshot, tuple[Stack, ...]]]] = WeakKeyDictionary()
_FIRST: WeakKeyDictionary[nn.Module, _FirstPasses] = WeakKeyDictionary()
_LAST: WeakKeyDictionary[nn.Module, tuple[tuple[Stack, ...], Batch]] = WeakKeyDictionary()
_PROVEN: WeakKeyDictionary[nn.Module, tuple[Snapshot, tuple[Stack, ...], tuple[Stack, ...]]] = WeakKeyDictionary()


def view_of(
    model: nn.Module,
    batch: Batch,
    *,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | None = None,
    measures: bool = True,
) -> ModelView:
    """Discover the stacks of ``model`` with a few forward passes on two short sequences of ``batch``.

    What was found is remembered for the model object and these sequences, until the model changes.

    Args:
        model: the model.
        batch: what it will be run on.
        blocks: pattern of the blocks' names, if they are not to be found.
        stream: how the stream is stored, if it is not to be found.
        measures: whether tokens will be measured, so that it has to be known which of them count.

    Raises:
        DiscoveryError: no blocks were found.
        LayoutError: the axes of their residual stream are not in the assumed order.
    """
    return once_more_uncompiled(partial(_view_of, model, batch, blocks, stream, measures))


def _view_of(
    model: nn.Module, batch: Batch, blocks: str | Sequence[str] | None, stream: Stream | None, measures: bool
) -> ModelView:
    small, sequences = probe_batch(batch, whole=_depends_on_length(model))
    keep = None if batch.keep is None else batch.keep[(sequences - 1) % batch.sequences]
    key = None if needs_all_ranks(model) else _kind_of(small, keep, blocks, stream, measures)
    snapshot, stacks = _VIEWS.setdefault(model, {}).get(key, (None, ()))
    if snapshot is not None and snapshot.fits(model):
        _LAST[model] = stacks, small
        return ModelView(model, stacks)
    with _as_written(model):
        draws = False

        def run() -> object:
            nonlocal draws
            with hidden():  # the kernel with which an accelerator seeds its generators is none of the model's
                seed_generators(0)  # some models use random numbers in evaluation too
            output = small.run(model)
            with hidden():
                draws = draws or have_drawn(0)
            return output

        def settled(
            blocks: str | Sequence[str] | None = blocks,
            stream: Stream | None = stream,
            begun: _FirstPasses | None = None,
        ) -> ModelView:
            first = None if begun is None else begun.first
            view = discover(model, run, batch=sequences, blocks=blocks, stream=stream, begun=first)
            known = None if begun is None else begun.known
            return agreed(view, small, sequences, keep=keep, measures=measures, known=known)

        begun: _FirstPasses | None = None
        try:
            begun = _FirstPasses.of(model, small, stream) or _begun(model, small, run, stream)
            view = settled(begun=begun)
        except DiscoveryError as error:
            first = None if begun is None else begun.first
            with_streams = None if stream is not None else _with_streams(model, small, sequences, blocks, keep, first)
            if with_streams is None:
                raise error.with_hints(_tried(error, settled)) from None
            view = with_streams
        view = replace(view, stacks=tuple(_with_true_skips(view, stack, small) for stack in view.stacks))
        if draws:
            noise = _noise(model, small)
            view = replace(view, stacks=tuple(replace(stack, noise=noise) for stack in view.stacks))
    _LAST[model] = view.stacks, small
    if key is not None:
        known = _VIEWS[model]
        known[key] = Snapshot(model), view.stacks
        if len(known) > _REMEMBERED:
            del known[next(iter(known))]
    return view


def _noise(model: nn.Module, small: Batch) -> str | None:
    """How two passes with other random numbers differ, in words; None if they do not."""
    returned: list[list[tuple[str, float]]] = []  # what each module returned, as one number
    outputs: list[Tensor] = []
    for seed in range(2):
        seen: list[tuple[str, float]] = []
        with ExitStack() as hooks:
            for name, module in model.named_modules():

                def note(module: nn.Module, args: Any, output: Any, name: str = name, seen: Any = seen) -> None:
                    tensors = [one.double().abs().sum() for one in tensors_in(output) if one.is_floating_point()]
                    seen.append((name, float(sum(tensors))))

                hooks.callback(module.register_forward_hook(note).remove)
            seed_generators(seed)
            output = tensors_in(small.run(model), depth=3)
        returned.append(seen)
        outputs.append(torch.cat([one.double().flatten() for one in output if one.is_floating_point()]))
    one, other = outputs
    first = next((a for (a, before), (_, after) in zip(*returned, strict=False) if before != after), None)
    if first is None or one.shape != other.shape or torch.equal(one, other):
        return None
    share = float((one - other).norm() / one.norm())
    return f"two equal passes differ by {share:.0%}, first in what {first or 'the model itself'} returns"


class _FirstPasses:
    """Passes from which the structure is found, together with the experiment on the axes of the inputs if there is one.

    Args:
        model: the model.
        batch: two sequences.
        stream: how the stream is stored, if declared.
    """

    def __init__(self, model: nn.Module, batch: Batch, stream: Stream | None = None) -> None:
        self.first = Pass(batch.sequences, stream, roles=True)
        self._watch = watch_lists(dict(model.named_modules()))
        self._model = weakref.ref(model)
        self._batch = batch
        self._snapshot: Snapshot | None = None
        self._changed: dict[int, dict[str | None, Ends]] = {}

    @classmethod
    def observing(cls, model: nn.Module, batch: Batch) -> _FirstPasses | None:
        """Observe the passes of an experiment, to be found again by :meth:`of`."""
        _FIRST.pop(model, None)
        if some_mode_is_awake():
            return None
        passes = cls(model, batch)
        passes._snapshot = Snapshot(model)
        return passes

    @classmethod
    def of(cls, model: nn.Module, batch: Batch, stream: Stream | None) -> _FirstPasses | None:
        """The passes of an experiment on this batch, once; None if there was none, or the model has changed since."""
        passes = _FIRST.pop(model, None)
        if passes is None or stream is not None or not _are_alike(passes._batch, batch):
            return None
        return passes if passes._snapshot is not None and passes._snapshot.fits(model) else None

    @property
    def known(self) -> Known:
        """What they showed of the blocks."""
        # Vectors are replaced as a whole in the experiment, and one number of them where the axes are in question.
        ids_only = not any(is_data(name, value) for name, value in named_inputs(self._batch))
        return Known(
            self._watch,
            self._changed.get(ONE_TOKEN) if ids_only else None,
            self._changed.get(FIRST_SEQUENCE) if ids_only else None,
        )

    @contextmanager
    def passing(self, number: int) -> Iterator[None]:
        """Observe the pass of an experiment of this number."""
        model = self._model()
        assert model is not None
        if number == 0:
            with self.first.on(model), self._watch.on(dict(model.named_modules())):
                yield
            return
        calls = FirstCalls([(name, Stream(), model.get_submodule(name)) for name in self._watch.first_blocks])
        with calls.on():
            yield
        self._changed[number] = calls.found
        if number == FIRST_SEQUENCE:
            _FIRST[model] = self


def _are_alike(one: Batch, other: Batch) -> bool:
    if (one.sequences, one.axis, one.batch_first) != (other.sequences, other.axis, other.batch_first):
        return False
    return digest_of((one.arguments, dict(one.inputs))) == digest_of((other.arguments, dict(other.inputs)))


def _begun(model: nn.Module, batch: Batch, run: Callable[[], object], stream: Stream | None) -> _FirstPasses:
    """The first pass."""
    passes = _FirstPasses(model, batch, stream)
    with passes.passing(0):
        run()
    return passes


def _kind_of(
    small: Batch, keep: Tensor | None, blocks: str | Sequence[str] | None, stream: Stream | None, measures: bool
) -> object:
    """What the structure depends on besides the model: the inputs, which may decide how deep it runs; declarations."""
    inputs = digest_of((small.arguments, dict(small.inputs)))
    counted = None if keep is None else tuple(keep.tolist())
    declared = blocks if blocks is None or isinstance(blocks, str) else tuple(blocks)
    return inputs, counted, declared, stream, measures, small.axis, small.batch_first


def with_proven_cuts(view: ModelView) -> ModelView:
    """The view, with a carry wherever the stream gets around a block in a way that surgery does not know.

    Found once for each model, with a few passes on the sequences on which its structure was found.
    """
    if all(stack.cuts_proven for stack in view.stacks):
        return view
    before, stacks, proven = _PROVEN.get(view.model, (None, (), ()))
    if before is None or stacks != view.stacks or not before.fits(view.model):
        _, probe = _LAST.get(view.model, ((), None))
        if probe is None or any(parameter.is_meta for parameter in view.model.parameters()):
            return view  # weights that are read block by block: proven before, with stand-ins
        with _as_written(view.model):
            proven = with_leaks(view, lambda: probe.run(view.model), probe.sequences).stacks
        _PROVEN[view.model] = Snapshot(view.model), view.stacks, proven
    return replace(view, stacks=proven)


@contextmanager
def _as_written(model: nn.Module) -> Iterator[None]:
    """Run a model without surgery and with its adapters merged, and otherwise undisturbed."""
    adapted = any(has_adapter(part) for name, part in model.named_modules() if name)
    with undisturbed(model), modes_asleep(), adapters_merged(model) if adapted else nullcontext():
        yield


def view_and_batches(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | None = None,
) -> tuple[ModelView, tuple[Batch, ...]]:
    """The view, and the batches as they are to be measured: without the padding that the model adds by itself."""
    try:
        return view_of(model, batches[0], blocks=blocks, stream=stream), tuple(batches)
    except PaddedInputError:
        marked = tuple(map(counted, batches))
        return view_of(model, marked[0], blocks=blocks, stream=stream), marked


def _tried(error: DiscoveryError, settled: Callable[..., ModelView]) -> list[str]:
    """The hints of an error that are accepted themselves; none if they read the axes in different ways."""
    passed = [(options.get("stream"), hint) for options, hint in error.hints if _passes(settled, options)]
    orders = {stream.axes for stream, _ in passed if isinstance(stream, Stream)}
    return [hint for _, hint in passed] if len(orders) < 2 else []


def _passes(settled: Callable[..., ModelView], options: Mapping[str, Any]) -> bool:
    """Whether a declaration is accepted."""
    try:
        settled(**options)
    except RankscopeError:
        return False
    return True


def _with_streams(
    model: nn.Module,
    small: Batch,
    sequences: int,
    blocks: str | Sequence[str] | None,
    keep: Tensor | None,
    begun: Pass | None,
) -> ModelView | None:
    """The only reading with several residual streams per token for which there is evidence; None if there is none."""
    readings = []
    for view in with_streams(model, lambda: small.run(model), batch=sequences, blocks=blocks, begun=begun):
        with suppress(LayoutError):
            settled = agreed(view, small, sequences, keep=keep)
            readings += [settled] if all(map(shows_streams, settled.stacks)) else []
    return readings[0] if len(readings) == 1 else None


def _with_true_skips(view: ModelView, stack: Stack, small: Batch) -> Stack:
    """The stack with one block per call and no skips, if its blocks do more to several streams than add to them.

    Where streams are mixed, a sum such as ``x + H x`` looks like a skip around a branch, and is neither.
    """
    if not stack.stream.has_streams or not stack.stream.has_plain_blocks or not any(plan.skips for plan in stack.plans):
        return stack
    if adds_only(view, stack, small):
        return stack
    calls = [replace(call, first_layer=layer, blocks=(_merged(call),)) for layer, call in enumerate(stack.calls)]
    return replace(stack, calls=tuple(calls))


def _merged(call: BlockCall) -> BlockPlan:
    attention = tuple(kind for plan in call.blocks for kind in plan.attention)
    adds = sum(len(plan.adds) for plan in call.blocks)
    return replace(call.blocks[0], adds=(None,) * adds, attention=attention, joins=(), parallel_mlp=None)


def need_plain_stream(view: ModelView, verb: str) -> None:
    """Check that a verb which also uses weights or exact arithmetic supports this stream.

    Raises:
        UnsupportedConfigError: the stream was declared with another layout.
    """
    for stack in view.stacks:
        if not stack.stream.is_plain:
            raise UnsupportedConfigError(
                f"{verb} reads a residual stream that is the first tensor of each block, as 'batch tokens dim' or "
                f"'tokens batch dim'. That of {stack.calls[0].module_name or type(view.model).__name__} lies as "
                f"'{stack.stream}', which measure and the gauge can read."
            )


def notes_on_hidden_attention(view: ModelView) -> list[str]:
    """A sentence for each stack with attention branches whose probabilities cannot be seen."""
    notes = []
    for stack in view.stacks:
        if not stack.hidden_attention:
            continue
        why = "no softmax over keys was seen in their attention branch. Token metrics are not affected"
        if stack.operators:
            why = (
                f"tokens are mixed inside an operator ({', '.join(stack.operators[:3])}) that does not show its "
                "probabilities. Token metrics are not affected. Load the model with attn_implementation='sdpa' or "
                "'eager' to measure attention"
            )
        where = f"{len(stack.hidden_attention)} of {stack.depth} blocks, from block {stack.hidden_attention[0]} on"
        notes.append(f"{f'{stack.name}: ' if stack.name else ''}attention metrics are not available in {where}: {why}")
    return notes


def notes_on_second_streams(view: ModelView) -> list[str]:
    """A sentence for each stack whose blocks pass on a second stream, which is not measured."""
    return [
        f"{f'{stack.name}: ' if stack.name else ''}blocks pass on a second stream of {tokens} tokens, which is not "
        f"measured: declare stream=rankscope.Stream(slot={slot!r}), --layout slot={slot}, to measure it instead"
        for stack in view.stacks
        for slot, tokens in stack.second_streams
    ]


def notes_on_noise(view: ModelView) -> list[str]:
    """A sentence if the model draws random numbers in evaluation mode, as with dropout that does not end there."""
    noises = dict.fromkeys(stack.noise for stack in view.stacks if stack.noise is not None)
    return [f"the model draws random numbers in evaluation mode: {noise}; what is told is one draw" for noise in noises]


def known_view(model: nn.Module) -> ModelView | None:
    """The structure that was found last, if any."""
    last = _LAST.get(model)
    return None if last is None else ModelView(model, last[0])


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run a model as written, in evaluation mode and without gradients.

    Mode, random state, FSDP2's shards and compiled code are restored.
    """
    was_training = [module for module in model.modules() if module.training]
    for module in was_training:
        module.training = False
    try:
        with uncompiled(model), resharded(model), torch.random.fork_rng(devices=[]), torch.no_grad():
            yield
    finally:
        for module in was_training:
            module.training = True


def _depends_on_length(model: nn.Module) -> bool:
    """Whether a short input would change the model: block-sparse models switch to full attention permanently."""
    return any(getattr(module, "attention_type", None) == "block_sparse" for module in model.modules())


def probe_batch(batch: Batch, *, whole: bool = False) -> tuple[Batch, int]:
    """Two sequences of the batch (the same one twice if there is only one), and at most 256 tokens of token ids.

    With ``whole``, all tokens. If there are two tokens, three sequences are used, because with as many tokens as
    sequences the two axes could not be distinguished.
    """
    named = [*(("", value) for value in batch.arguments), *batch.inputs.items()]
    tensors = [(value, 1 - batch.axis_of(name)) for name, value in named if isinstance(value, Tensor)]
    rows = 3 if any(value.dim() > 1 and value.shape[tokens] == 2 for value, tokens in tensors) else 2
    crop = not whole and _are_token_ids(tensors)

    def cut(name: str, value: Tensor, axis: int) -> Tensor:
        taken = value.index_select(axis, torch.arange(rows, device=value.device) % batch.sequences)
        return taken.narrow(1 - axis, 0, min(PROBE_TOKENS, taken.shape[1 - axis])) if crop else taken

    return batch.mapped(cut, keep=None, first_sequence=0, sequences=rows), rows


def _are_token_ids(tensors: Sequence[tuple[Tensor, int]]) -> bool:
    """Whether every tensor is ``batch x tokens`` integers of one length, which may be truncated."""
    if any(value.is_floating_point() or value.dim() != 2 for value, _ in tensors):
        return False
    return len({value.shape[tokens] for value, tokens in tensors}) == 1


observe_experiments(_FirstPasses.observing)
