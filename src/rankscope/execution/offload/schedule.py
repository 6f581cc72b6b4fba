"""A model larger than memory, one block after the other: all batches go through a block before the next is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rankscope.execution.offload.budget import Need
from rankscope.execution.offload.gate import Gate, PassEnds, map_tensors
from rankscope.execution.offload.meta_model import Skeleton
from rankscope.execution.offload.states import StateStore
from rankscope.execution.offload.weights import BlockWeights
from rankscope.execution.offload.work_folder import Progress, work_folder
from rankscope.models.inputs import Batch, Prepared
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.view import ModelView, Stack
from rankscope.stream.frames import output_tensor
from rankscope.stream.viewing import undisturbed


@dataclass(frozen=True)
class PartOfStack(Stack):
    """Some calls of a stack, which knows how deep the whole is."""

    whole: int = 0

    @property
    def depth(self) -> int:
        """Blocks of the whole stack."""
        return self.whole


@dataclass(frozen=True)
class Terms:
    """What the user allowed.

    Attributes:
        memory: budget, e.g. ``"3GiB"``; None for no limit.
        work: folder in which an unfinished run is kept; None for none.
    """

    memory: int | str | None = None
    work: str | Path | None = None


@dataclass(frozen=True)
class Stage:
    """One block with its weights present, or the final norm behind the last.

    Attributes:
        number: of the block call, from 0; the number of calls for the final norm.
        view: the model, seen as if this block were all of it; for followers of the stream.
    """

    number: int
    view: ModelView
    _gate: Gate = field(repr=False)
    _store: StateStore = field(repr=False)

    @property
    def is_final(self) -> bool:
        """Whether only what lies behind the last block runs."""
        return not self.view.stacks[0].calls

    @contextmanager
    def through(self, part: Batch, lane: str = "", *, keep: bool = True) -> Iterator[None]:
        """Inside the block a forward pass of the model on ``part`` is a pass of this stage, from where it was left.

        Args:
            part: the batch; told from others by the number of its first sequence.
            lane: the network the stream belongs to, where several run side by side.
            keep: what comes out is where the next stage begins; False for a look that is to be repeated.
        """
        key = (lane, part.first_sequence)
        state = None if self.number == 0 else self._store.take(key, again=not keep)
        self._gate.open_at(self.number, state if keep else map_tensors(state, Tensor.clone))
        state = None
        with ExitStack() as stack:
            stack.callback(self._gate.close)
            if self.is_final:
                stack.callback(self._ends_behind_the_norm().remove)
            yield
            if keep and not self.is_final:
                self._store.put(key, self._gate.out)

    def left(self, part: Batch, lane: str = "") -> Tensor | None:
        """The stream as the block before left it; None before the first block."""
        return None if self.number == 0 else output_tensor(self._store.take((lane, part.first_sequence), again=True))

    def _ends_behind_the_norm(self) -> Any:
        def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            raise PassEnds

        final = self.view.stacks[0].final_norm
        assert final is not None
        return self.view.modules()[final].register_forward_hook(end)


@dataclass(frozen=True)
class Walk:
    """A streamed run, ready to go.

    Attributes:
        view: the whole model.
        need: estimate of what it takes.
        in_memory: whether the streams of all batches stay in memory.
        blocks_read: how often weights of a block were read from disk, once the stages have run.
    """

    skeleton: Skeleton
    prepared: Prepared
    view: ModelView
    need: Need
    in_memory: bool
    terms: Terms
    key: str
    tally: dict[str, int] = field(default_factory=dict)

    def stages(self, progress: Progress, *, final: bool = False) -> Iterator[Stage]:
        """One stage after the other; what is found in one is safe when the next begins.

        Args:
            progress: takes in what an earlier process found, and gives what is to be kept.
            final: end with a stage of the final norm, if the model has one.
        """
        stack = self.view.stacks[0]
        gate = Gate(self.view)
        with ExitStack() as opened:
            enter = opened.enter_context
            folder, spill = enter(work_folder(self.terms.work, self.key, spills=not self.in_memory))
            store = StateStore(spill, in_memory=self.in_memory)
            done = folder.restore(progress)
            store.resume(done)
            weights = enter(BlockWeights(self.skeleton, stack))
            enter(undisturbed(self.view.model))
            enter(quiet_transformers())
            enter(gate.standing())
            for number in range(done, len(stack.calls) + (final and stack.final_norm is not None)):
                weights.place(number) if number < len(stack.calls) else weights.take_out()
                yield Stage(number, self._view_at(number), gate, store)
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
