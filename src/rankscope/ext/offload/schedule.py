"""Runs a model larger than memory: all batches go through a block before the weights of the next block are read."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rankscope.errors import RankscopeError, UnsupportedConfigError
from rankscope.execution.budget import Need, keeps_streams_in_memory, reads_ahead, resident_bytes
from rankscope.ext.offload.gate import BlockGate, PassEnds, map_tensors
from rankscope.ext.offload.meta_model import MetaModel, read_rest, rest_bytes, standing_in
from rankscope.ext.offload.states import StateStore
from rankscope.ext.offload.weights import BlockWeights, largest_block
from rankscope.models.inputs import Batch, Prepared
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView, Stack
from rankscope.stream.frames import output_tensor
from rankscope.stream.viewing import undisturbed, view_of, with_proven_cuts

_STILL_TO_COME = 100 * 2**20
"""Memory of libraries first used when a block is measured, and memory that the allocator does not return."""


@dataclass(frozen=True)
class PartOfStack(Stack):
    """Some calls of a stack, with the depth of the whole stack."""

    whole: int = 0

    @property
    def depth(self) -> int:
        """Blocks of the whole stack."""
        return self.whole


@dataclass(frozen=True)
class BlockStage:
    """One block with its weights present, or the final norm after the last block.

    Attributes:
        number: number of the block call, from 0; for the final norm, the number of calls.
        view: the model, seen as if this block were all of it.
    """

    number: int
    view: ModelView
    _gate: BlockGate = field(repr=False)
    _store: StateStore = field(repr=False)

    @property
    def is_final(self) -> bool:
        """Whether only what comes after the last block runs."""
        return not self.view.stacks[0].calls

    @contextmanager
    def through(self, part: Batch, variant_key: str = "", *, keep: bool = True) -> Iterator[None]:
        """Inside this context, a forward pass of the model on ``part`` runs this block only, from the stored state.

        Args:
            part: the batch, identified by the number of its first sequence.
            variant_key: names the network the residual stream belongs to, if several run side by side.
            keep: whether the next stage starts from the output; False for a pass that will be repeated.
        """
        key = (variant_key, part.first_sequence)
        state = None if self.number == 0 else self._store.take(key, again=not keep)
        # A pass may write to its input in place; one that will be repeated works on a copy.
        self._gate.open_at(self.number, state if keep else map_tensors(state, Tensor.clone))
        state = None  # the gate has the only reference, so that the memory is freed as soon as possible
        with ExitStack() as stack:
            stack.callback(self._gate.close)
            if self.is_final:
                stack.callback(self._end_after_the_norm().remove)
            yield
            if keep and not self.is_final:
                self._store.put(key, self._gate.out)

    def left(self, part: Batch, variant_key: str = "") -> Tensor | None:
        """The residual stream after the previous block; None before the first block."""
        key = (variant_key, part.first_sequence)
        return None if self.number == 0 else output_tensor(self._store.take(key, again=True))

    def _end_after_the_norm(self) -> Any:
        def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            raise PassEnds

        final = self.view.stacks[0].final_norm
        assert final is not None
        return self.view.modules()[final].register_forward_hook(end)


@dataclass(frozen=True)
class BlockSchedule:
    """An offloaded run, ready to start.

    Attributes:
        view: the whole model.
        need: estimate of its memory.
        in_memory: whether the residual streams of all batches stay in memory between blocks.
        tally: after the stages have run, how often the weights of a block were read (``blocks_read``).
    """

    meta_model: MetaModel
    prepared: Prepared
    view: ModelView
    need: Need
    in_memory: bool
    tally: dict[str, int] = field(default_factory=dict)

    def stages(self, *, final: bool = False) -> Generator[BlockStage, None, None]:
        """The stages in order.

        Args:
            final: end with a stage of the final norm, if the model has one.
        """
        stack = self.view.stacks[0]
        gate = BlockGate(self.view)
        with ExitStack() as opened:
            enter = opened.enter_context
            spill = None if self.in_memory else Path(enter(tempfile.TemporaryDirectory(prefix="rankscope-stream-")))
            store = StateStore(spill)
            weights = enter(BlockWeights(self.meta_model, stack, ahead=self.need.ahead > 0))
            enter(undisturbed(self.view.model))
            enter(quiet_transformers())
            enter(gate.standing())
            for number in range(len(stack.calls) + (final and stack.final_norm is not None)):
                weights.place(number) if number < len(stack.calls) else weights.take_out()
                yield BlockStage(number, self._view_at(number), gate, store)
                store.advance()
            self.tally.update(blocks_read=weights.blocks_read)

    def _view_at(self, number: int) -> ModelView:
        stack = self.view.stacks[0]
        calls = stack.calls[number : number + 1]
        final_norm = None if calls else stack.final_norm
        part = PartOfStack(stack.name, calls, stack.stream, final_norm, whole=stack.depth, sums=stack.sums)
        return ModelView(self.view.model, (part,))


def plan_schedule(
    meta_model: MetaModel,
    prepared: Prepared,
    memory: int | str | None = None,
    *,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | None = None,
    variants: int = 1,
    widened: bool = False,
) -> BlockSchedule:
    """Find the blocks, read everything outside them, and check the memory budget.

    Args:
        meta_model: the model.
        prepared: its inputs.
        memory: memory budget, e.g. ``"3GiB"``; None for no limit.
        blocks: names or patterns of the block modules, if discovery needs help.
        stream: where the residual stream is, if it was declared.
        variants: number of networks that run side by side.
        widened: whether the weights of a block are also kept in float64.

    Raises:
        UnsupportedConfigError: the model is not a single sequence of blocks.
        InputError: the budget is too small for one block.
    """
    view = _seen(meta_model, prepared, blocks, stream)
    stack = _only_stack(view)
    view = _without_long_skips(view)
    names = list(dict.fromkeys(call.module_name for call in stack.calls))
    need = _need(meta_model, prepared, names, variants=variants, widened=widened)
    if not reads_ahead(need, memory):
        need = replace(need, ahead=0)
    in_memory = keeps_streams_in_memory(need, memory)
    read_rest(meta_model, names, prepared)
    return BlockSchedule(meta_model, prepared, view, need, in_memory)


def _seen(
    meta_model: MetaModel, prepared: Prepared, blocks: str | Sequence[str] | None, stream: Stream | None
) -> ModelView:
    """The structure of the model, discovered in a pass with zeros for its weights."""
    model = meta_model.loaded.model
    try:
        with standing_in(meta_model.slots), quiet_transformers():
            view = view_of(model, prepared[0], blocks=blocks, stream=stream)
            return with_proven_cuts(view)  # here, because the model cannot run as a whole later
    except RankscopeError:
        raise
    except Exception as error:
        raise UnsupportedConfigError(
            f"{type(model).__name__} cannot be run without its weights, which is needed to find its blocks: "
            f"{type(error).__name__}: {error}. Leave offload out."
        ) from error


def _without_long_skips(view: ModelView) -> ModelView:
    """The same view with its long skips marked as such that surgery cannot scale: one block runs at a time."""
    stacks = [
        replace(stack, carries=tuple(replace(carry, calls_begun=None) for carry in stack.carries))
        for stack in view.stacks
    ]
    return replace(view, stacks=tuple(stacks))


def _only_stack(view: ModelView) -> Stack:
    """The stack of a model that can run block by block.

    Raises:
        UnsupportedConfigError: there are several stacks, blocks that are not separate modules, or a block that needs
            the output of an earlier one, other than the block before it.
    """
    name = type(view.model).__name__
    if len(view.stacks) > 1:
        names = ", ".join(str(stack.name) for stack in view.stacks)
        raise UnsupportedConfigError(
            f"{name} has several stacks ({names}), and offload supports only one. Leave offload out; a "
            "model larger than memory can be loaded with device_map= of transformers, and passed."
        )
    stack = view.stacks[0]
    if len(stack.calls) < 2 or any(len(call.blocks) != 1 or call.final_norm_inside for call in stack.calls):
        raise UnsupportedConfigError(
            f"The blocks of {name} are not separate modules, so none can be run without the others. Name the "
            "block modules with blocks='layers.*', or leave offload out."
        )
    # The states of earlier blocks are not kept: only what was there before the first block is computed again.
    long = [c for c in stack.carries if c.first > 0 and (c.calls_begun is not None or c.last > c.first)]
    if long:
        raise UnsupportedConfigError(
            f"{name} carries the output of a block around later ones ({long[0].where}), and offload keeps only that of "
            "the last block. Leave offload out; a model larger than memory can be loaded with device_map=."
        )
    return stack


def _need(meta_model: MetaModel, prepared: Prepared, names: Sequence[str], *, variants: int, widened: bool) -> Need:
    """Estimate from shapes alone: the widest activations and the attention of one batch, and statistics in float64."""
    config = meta_model.loaded.config
    assert config is not None
    text = config.get_text_config().to_dict()
    inside = [slot for slot in meta_model.slots.values() if any(slot.name.startswith(f"{name}.") for name in names)]
    widest = max((max(slot.parameter.shape, default=1) for slot in inside), default=1)
    width = _number(text, ("hidden_size", "n_embd", "d_model"), widest)
    heads = _number(text, ("num_attention_heads", "n_head"), 1)
    own = max(slot.parameter.dtype.itemsize for slot in inside)
    size = 8 if widened else own
    rows = [_rows(part) for part in prepared]
    # The stream of every batch, once; doubled below because a block reads one generation and writes the next.
    states = sum(sequences * tokens for sequences, tokens in rows) * width * size * variants
    sequences, tokens = max(rows, key=lambda shape: shape[0] * shape[1] ** 2)
    work = sequences * tokens * (4 * widest * size + 6 * width * 8) + sequences * heads * tokens**2 * (2 * size + 3 * 8)
    largest = largest_block(meta_model, names)
    process = resident_bytes() + _STILL_TO_COME + rest_bytes(meta_model, names, prepared)
    ahead = 0 if meta_model.folder.traffic is None else largest
    return Need(process, largest, largest * 8 // own if widened else 0, work, 2 * states, ahead)


def _number(facts: Mapping[str, Any], names: Sequence[str], otherwise: int) -> int:
    """The first of these entries that is an integer."""
    return next((facts[name] for name in names if isinstance(facts.get(name), int)), otherwise)


def _rows(part: Batch) -> tuple[int, int]:
    tensors = [value for value in (*part.inputs.values(), *part.arguments) if isinstance(value, Tensor)]
    longest = max((value.shape[1] for value in tensors if value.dim() > 1), default=1)
    return part.sequences, int(longest)
