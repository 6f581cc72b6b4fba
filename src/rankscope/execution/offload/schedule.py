"""A model larger than memory, block by block: all batches go through a block before the next one's weights are read."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rankscope.errors import RankscopeError, UnsupportedConfigError
from rankscope.execution.offload.budget import Need, keeps_streams_in_memory, resident_bytes
from rankscope.execution.offload.gate import BlockGate, PassEnds, map_tensors
from rankscope.execution.offload.meta_model import MetaModel, read_rest, rest_bytes, standing_in
from rankscope.execution.offload.states import StateStore
from rankscope.execution.offload.weights import BlockWeights, slots_of_blocks
from rankscope.execution.offload.work_folder import Progress, content_key, work_folder
from rankscope.models.inputs import Batch, Prepared
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView, Stack
from rankscope.stream.frames import output_tensor
from rankscope.stream.viewing import undisturbed, view_of

_STILL_TO_COME = 100 * 2**20
"""What libraries take that are first used when a block is measured, and what the allocator does not give back."""


@dataclass(frozen=True)
class PartOfStack(Stack):
    """Some calls of a stack, which knows how deep the whole is."""

    whole: int = 0

    @property
    def depth(self) -> int:
        """Blocks of the whole stack."""
        return self.whole


@dataclass(frozen=True)
class OffloadLimits:
    """What the user allowed an offloaded run.

    Attributes:
        memory: budget, e.g. ``"3GiB"``; None for no limit.
        work: folder for checkpoints, so that a killed run can resume; None for none.
    """

    memory: int | str | None = None
    work: str | Path | None = None


@dataclass(frozen=True)
class BlockStage:
    """One block with its weights present, or the final norm after the last block.

    Attributes:
        number: of the block call, from 0; the number of calls for the final norm.
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
        """Inside this context, a forward pass of the model on ``part`` runs this block only, from where it was left.

        Args:
            part: the batch, identified by the number of its first sequence.
            variant_key: names the network the residual stream belongs to, if several run side by side.
            keep: whether the next stage starts from what comes out; False for a pass that will be repeated.
        """
        key = (variant_key, part.first_sequence)
        state = None if self.number == 0 else self._store.take(key, again=not keep)
        self._gate.open_at(self.number, state if keep else map_tensors(state, Tensor.clone))
        state = None
        with ExitStack() as stack:
            stack.callback(self._gate.close)
            if self.is_final:
                stack.callback(self._end_after_the_norm().remove)
            yield
            if keep and not self.is_final:
                self._store.put(key, self._gate.out)

    def left(self, part: Batch, variant_key: str = "") -> Tensor | None:
        """The residual stream as the block before left it; None before the first block."""
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
        need: estimate of what it takes.
        in_memory: whether the residual streams of all batches stay in memory between blocks.
        tally: how often the weights of a block were read (``blocks_read``) and which stage an earlier process had
            reached (``resumed_at``), once the stages have run.
    """

    meta_model: MetaModel
    prepared: Prepared
    view: ModelView
    need: Need
    in_memory: bool
    limits: OffloadLimits
    key: str
    tally: dict[str, int] = field(default_factory=dict)

    def stages(self, progress: Progress, *, final: bool = False) -> Generator[BlockStage, None, None]:
        """The stages in order; what is found in one is on disk when the next begins, if there is a work folder.

        Args:
            progress: takes in what an earlier process found, and returns what to keep.
            final: end with a stage of the final norm, if the model has one.
        """
        stack = self.view.stacks[0]
        gate = BlockGate(self.view)
        with ExitStack() as opened:
            enter = opened.enter_context
            folder, spill = enter(work_folder(self.limits.work, self.key, spills=not self.in_memory))
            store = StateStore(spill, in_memory=self.in_memory)
            done = folder.restore(progress)
            store.resume(done)
            weights = enter(BlockWeights(self.meta_model, stack))
            enter(undisturbed(self.view.model))
            enter(quiet_transformers())
            enter(gate.standing())
            for number in range(done, len(stack.calls) + (final and stack.final_norm is not None)):
                weights.place(number) if number < len(stack.calls) else weights.take_out()
                yield BlockStage(number, self._view_at(number), gate, store)
                store.advance()
                folder.finish(number, progress)
                store.forget_before()
            self.tally.update(blocks_read=weights.blocks_read, resumed_at=done)

    def _view_at(self, number: int) -> ModelView:
        stack = self.view.stacks[0]
        calls = stack.calls[number : number + 1]
        final_norm = None if calls else stack.final_norm
        part = PartOfStack(stack.name, calls, stack.stream, final_norm, whole=stack.depth, sums=stack.sums)
        return ModelView(self.view.model, (part,))


def plan_schedule(
    meta_model: MetaModel,
    prepared: Prepared,
    limits: OffloadLimits,
    *,
    options: Mapping[str, Any],
    blocks: str | Sequence[str] | None = None,
    stream: Stream | None = None,
    variants: int = 1,
    widened: bool = False,
) -> BlockSchedule:
    """Find the blocks, read what is outside them, and see whether the budget has room.

    Args:
        meta_model: the model.
        prepared: its inputs.
        limits: what the user allowed.
        options: everything else that decides the values, for the key of the run.
        blocks: names or patterns of the block modules, if discovery needs help.
        stream: where the residual stream is, if it was declared.
        variants: how many networks run side by side.
        widened: whether a block's weights are also held in float64.

    Raises:
        UnsupportedConfigError: the model is not one plain row of blocks.
        InputError: the budget has no room for one block.
    """
    view = _seen(meta_model, prepared, blocks, stream)
    stack = _only_stack(view)
    names = list(dict.fromkeys(call.module_name for call in stack.calls))
    largest = max(sum(s.nbytes for s in slots) for slots in slots_of_blocks(meta_model, names).values())
    need = _need(meta_model, prepared, names, largest, variants=variants, widened=widened)
    in_memory = keeps_streams_in_memory(need, limits.memory)
    read_rest(meta_model, names, prepared)
    key = content_key(meta_model.paths, prepared, {**options, "config": meta_model.loaded.config_hash})
    return BlockSchedule(meta_model, prepared, view, need, in_memory, limits, key)


def _seen(
    meta_model: MetaModel, prepared: Prepared, blocks: str | Sequence[str] | None, stream: Stream | None
) -> ModelView:
    """The structure of the model, from a pass with zeros for its weights."""
    model = meta_model.loaded.model
    try:
        with standing_in(meta_model.slots), quiet_transformers():
            return view_of(model, prepared[0], blocks=blocks, stream=stream)
    except RankscopeError:
        raise
    except Exception as error:
        raise UnsupportedConfigError(
            f"{type(model).__name__} cannot be run without its weights, to see how it is built: "
            f"{type(error).__name__}: {error}. Leave offload out."
        ) from error


def _only_stack(view: ModelView) -> Stack:
    """The stack of a model that can be walked, block by block.

    Raises:
        UnsupportedConfigError: there are several, or blocks that are no modules of their own.
    """
    name = type(view.model).__name__
    if len(view.stacks) > 1:
        found = ", ".join(str(stack.name) for stack in view.stacks)
        raise UnsupportedConfigError(
            f"{name} has several stacks ({found}), and one is to be offloaded at a time. Leave offload out; for a "
            "model larger than memory use load(spec, device_map=...)."
        )
    stack = view.stacks[0]
    if len(stack.calls) < 2 or any(len(call.blocks) != 1 or call.final_norm_inside for call in stack.calls):
        raise UnsupportedConfigError(
            f"The blocks of {name} are no modules of their own, so that none can be run without the others. Name the "
            "block modules with blocks='layers.*', or leave offload out."
        )
    return stack


def _need(
    meta_model: MetaModel, prepared: Prepared, names: Sequence[str], largest: int, *, variants: int, widened: bool
) -> Need:
    """From shapes alone: the widest matrices and the attention of one batch, in and out, and float64 beside them."""
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
    states = sum(sequences * tokens for sequences, tokens in rows) * width * size * variants
    sequences, tokens = max(rows, key=lambda shape: shape[0] * shape[1] ** 2)
    work = sequences * tokens * (4 * widest * size + 6 * width * 8) + sequences * heads * tokens**2 * (2 * size + 3 * 8)
    process = resident_bytes() + _STILL_TO_COME + rest_bytes(meta_model, names, prepared)
    return Need(process, largest, largest * 8 // own if widened else 0, work, 2 * states)


def _number(facts: Mapping[str, Any], names: Sequence[str], otherwise: int) -> int:
    """The first of these entries that is one number."""
    return next((facts[name] for name in names if isinstance(facts.get(name), int)), otherwise)


def _rows(part: Batch) -> tuple[int, int]:
    tensors = [value for value in (*part.inputs.values(), *part.arguments) if isinstance(value, Tensor)]
    longest = max((value.shape[1] for value in tensors if value.dim() > 1), default=1)
    return part.sequences, int(longest)
