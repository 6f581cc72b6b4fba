"""The one loop a verb writes, whether the model is in memory, read block by block, or shared by several ranks.

.. code-block:: python

    with executing(MEASURE.execution, model, seed=seed, dtype=dtype, parallel=parallel, offload=offload) as execution:
        view = execution.plan(prepared, identity, blocks=blocks, stream=stream)
        with execution.stages(findings) as stages:
            for stage in stages:
                with trace(stage.view, sites, execution.watch(reader)):
                    for part in execution.batches():
                        with stage.through(part):
                            part.run(view.model)
        execution.collect(findings, order)

A stage is the part of the model that runs at once: all of it in memory, one block when it is offloaded. The batches are
all of them, or those dealt out to this rank. ``collect`` ends with the same rows in the same order in every case.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from rankscope.errors import InputError, UnsupportedConfigError
from rankscope.execution.findings import Findings
from rankscope.execution.offload.budget import parse_size
from rankscope.execution.offload.meta_model import MetaModel, open_meta_model
from rankscope.execution.offload.schedule import BlockSchedule, BlockStage, OffloadLimits, plan_schedule
from rankscope.execution.ranks import RankShare, parallel_mode, sharing
from rankscope.execution.support import PARALLEL_MODES, ExecutionSupport, Parallel
from rankscope.models.inputs import Batch, Prepared
from rankscope.models.loading import LoadedModel
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.stream import Stream, stream_of
from rankscope.models.view import ModelView
from rankscope.runs.rows import Piece
from rankscope.stream.tracer import Observer
from rankscope.stream.viewing import undisturbed


class Stage(Protocol):
    """The part of a model that runs at once."""

    @property
    def view(self) -> ModelView:
        """The model, seen as if this part were all of it."""

    def through(self, part: Batch, variant_key: str = "", *, keep: bool = True) -> AbstractContextManager[None]:
        """Inside this context, a forward pass of the model on ``part`` is a pass of this stage.

        Args:
            part: the batch.
            variant_key: names the network the residual stream belongs to, if several run side by side.
            keep: whether the next stage starts from what comes out; False for a pass that will be repeated.
        """

    def left(self, part: Batch, variant_key: str = "") -> Tensor | None:
        """The residual stream as the stage before left it; None in the first stage."""


@dataclass(frozen=True)
class WholeModel:
    """The only stage of a model in memory."""

    view: ModelView

    def through(self, part: Batch, variant_key: str = "", *, keep: bool = True) -> AbstractContextManager[None]:
        """Nothing to restore: a pass of this stage is a pass of the model."""
        return nullcontext()

    def left(self, part: Batch, variant_key: str = "") -> Tensor | None:
        """There is no stage before."""
        return None


class Execution(ABC):
    """How the forward passes of one call of a verb are run; see the module for the loop.

    Args:
        support: the declaration of the verb.
        loaded: the model and the facts about it.
        shown: whether to show a progress bar.

    Attributes:
        prepared: the inputs :meth:`plan` was given. In memory, the same inputs in other batches may replace them.
    """

    prepared: Prepared

    def __init__(self, support: ExecutionSupport, loaded: LoadedModel, *, shown: bool) -> None:
        self.verb = support.verb
        self.loaded = loaded
        self._shown = shown

    @abstractmethod
    def plan(
        self,
        prepared: Prepared,
        identity: tuple[Any, ...] = (),
        *,
        blocks: str | Sequence[str] | None = None,
        stream: Stream | None = None,
        model: nn.Module | None = None,
        variants: int = 1,
        reads_weights: bool = False,
    ) -> ModelView:
        """Discover the structure of the model, and make ready to run it on these inputs.

        Args:
            prepared: the inputs.
            identity: everything besides the model and its inputs that decides the values, so that an offloaded run
                that was killed is resumed by the same call only.
            blocks: names or patterns of the block modules, if discovery needs help.
            stream: where the residual stream is, if it was declared.
            model: runs in place of the loaded one (a random twin); in memory only.
            variants: how many networks run side by side.
            reads_weights: whether the verb computes with the weights themselves, in float64.
        """

    @abstractmethod
    def stages(
        self, findings: Findings, *, passes: int = 1, final: bool = False
    ) -> AbstractContextManager[Iterable[Stage]]:
        """The stages, in order; the model is in evaluation mode meanwhile, and as it was found afterwards.

        Args:
            findings: what is found; kept after each block when the model is offloaded with a work folder.
            passes: how many times the verb goes through :meth:`batches` in a stage, for the progress bar.
            final: whether the final norm, if there is one, must run too.
        """

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """The batches of this process, in order; each is done when the next is asked for."""

    def watch(self, observe: Observer) -> Observer:
        """The observer to pass to the tracer; needed if the model may be spread over ranks."""
        return observe

    def collect(self, findings: Findings, order: Callable[[Piece], Any] = lambda piece: piece.first_sequence) -> None:
        """Bring everything that was found together, on every rank, with the rows in the order of one process.

        Args:
            findings: holds what this process found, and everything afterwards.
            order: sort key of the rows; rows of one batch stay as they were written.
        """
        findings.arrange(order)

    def from_first(self, act: Callable[[], Any]) -> Any:
        """What ``act`` returns on the first rank, on every rank; for work that is not worth repeating. JSON only."""
        return act()

    @property
    def is_in_memory(self) -> bool:
        """Whether the model can be run as a whole once more."""
        return True

    @property
    def ends_batch_by_batch(self) -> bool:
        """Whether this process finishes every batch before the next, so that an interrupt leaves something whole."""
        return True

    @property
    @abstractmethod
    def described(self) -> dict[str, Any]:
        """What a run records about its execution; nothing for one process and a model in memory."""


class InMemory(Execution):
    """The model is in memory, whole or this rank's part of it.

    Args:
        support: the declaration of the verb.
        loaded: the model and the facts about it.
        share: of this process.
        shown: whether to show a progress bar.
    """

    def __init__(self, support: ExecutionSupport, loaded: LoadedModel, share: RankShare, *, shown: bool) -> None:
        super().__init__(support, loaded, shown=shown and share.is_first)
        self._share = share
        self._view: ModelView | None = None
        self._bar: tqdm[Any] | None = None

    def plan(
        self,
        prepared: Prepared,
        identity: tuple[Any, ...] = (),
        *,
        blocks: str | Sequence[str] | None = None,
        stream: Stream | None = None,
        model: nn.Module | None = None,
        variants: int = 1,
        reads_weights: bool = False,
    ) -> ModelView:
        """Discover the structure."""
        model = self.loaded.model if model is None else model
        if reads_weights:
            _need_weights(model, self.verb)
        with undisturbed(model), quiet_transformers():
            self._view = self._share.view(model, prepared, blocks, stream)
        self.prepared = prepared
        return self._view

    @contextmanager
    def stages(self, findings: Findings, *, passes: int = 1, final: bool = False) -> Iterator[Iterable[Stage]]:
        """One stage, which is the whole model."""
        assert self._view is not None
        total = passes * len(self._share.own(self.prepared))
        self._bar = tqdm(total=total, desc=self.verb, unit="batch", disable=not self._shown)
        with self._bar, undisturbed(self._view.model), quiet_transformers():
            yield (WholeModel(self._view),)

    def batches(self) -> Iterator[Batch]:
        """All batches, or those dealt out to this rank."""
        assert self._view is not None
        for part in self._share.batches(self.prepared, self._view.model):
            yield part
            if self._bar is not None:
                self._bar.update()

    def watch(self, observe: Observer) -> Observer:
        """An observer whose errors do not hang other ranks."""
        return self._share.watch(observe)

    def collect(self, findings: Findings, order: Callable[[Piece], Any] = lambda piece: piece.first_sequence) -> None:
        """Gather the findings of all ranks."""
        self._share.collect(findings, self.loaded)
        super().collect(findings, order)

    def from_first(self, act: Callable[[], Any]) -> Any:
        """Act on the first rank only."""
        return self._share.from_first(act)

    @property
    def ends_batch_by_batch(self) -> bool:
        """Only without other ranks, which would wait for this one."""
        return self._share.is_alone

    @property
    def described(self) -> dict[str, Any]:
        """The number of processes, if there were several."""
        return self._share.described


class Offloaded(Execution):
    """The weights of one block at a time are in memory, read from a local folder.

    Args:
        support: the declaration of the verb.
        meta_model: the model without its weights.
        limits: memory and work folder the user allowed.
        shown: whether to show a progress bar.
    """

    def __init__(self, support: ExecutionSupport, meta_model: MetaModel, limits: OffloadLimits, *, shown: bool) -> None:
        super().__init__(support, meta_model.loaded, shown=shown)
        self._meta_model, self._limits = meta_model, limits
        self._schedule: BlockSchedule | None = None

    def plan(
        self,
        prepared: Prepared,
        identity: tuple[Any, ...] = (),
        *,
        blocks: str | Sequence[str] | None = None,
        stream: Stream | None = None,
        model: nn.Module | None = None,
        variants: int = 1,
        reads_weights: bool = False,
    ) -> ModelView:
        """Discover the structure without weights, and check the memory budget."""
        assert model is None or model is self.loaded.model
        self.prepared = prepared
        options = [str(option) for option in (self.verb, *identity)]
        named = {"options": options, "dtype": self.loaded.dtype, "blocks": blocks}
        if stream is not None:
            named["stream"] = str(stream)
        self._schedule = plan_schedule(
            self._meta_model,
            prepared,
            self._limits,
            options=named,
            blocks=blocks,
            stream=stream,
            variants=variants,
            widened=reads_weights,
        )
        return self._schedule.view

    @contextmanager
    def stages(self, findings: Findings, *, passes: int = 1, final: bool = False) -> Iterator[Iterable[Stage]]:
        """One stage per block, and one for the final norm."""
        assert self._schedule is not None
        with closing(self._schedule.stages(findings, final=final)) as stages:
            yield self._counted(stages)

    def _counted(self, stages: Iterator[BlockStage]) -> Iterator[Stage]:
        assert self._schedule is not None
        depth = self._schedule.view.depth
        with tqdm(total=depth, desc=self.verb, unit="block", disable=not self._shown) as bar:
            for stage in stages:
                bar.update(stage.number - bar.n)
                yield stage
            bar.update(depth - bar.n)

    def batches(self) -> Iterator[Batch]:
        """All batches."""
        yield from self.prepared

    @property
    def is_in_memory(self) -> bool:
        """It is not."""
        return False

    @property
    def ends_batch_by_batch(self) -> bool:
        """Every batch ends with the last block."""
        return False

    @property
    def described(self) -> dict[str, Any]:
        """How often blocks were read, and what memory was estimated."""
        schedule = self._schedule
        if schedule is None:
            return {}
        return {
            "offload": {
                "blocks_read": schedule.tally["blocks_read"],
                "resumed_at": schedule.tally["resumed_at"],
                "states_in_memory": schedule.in_memory,
                "estimated_bytes": schedule.need.total(in_memory=schedule.in_memory),
            }
        }


@contextmanager
def executing(
    support: ExecutionSupport,
    model: str | Path | nn.Module,
    *,
    seed: int,
    dtype: torch.dtype | str | None,
    offload: bool = False,
    memory: int | str | None = None,
    work: str | Path | None = None,
    parallel: Parallel | None = None,
    progress: bool = False,
) -> Iterator[Execution]:
    """Load a model as the user asked, or open it without its weights.

    Args:
        support: the declaration of the verb.
        model: a spec or a module.
        seed: of a random initialisation.
        dtype: of the weights, if they are loaded here.
        offload: read a local folder block by block.
        memory: with ``offload``, the budget.
        work: with ``offload``, the folder for checkpoints.
        parallel: how the processes of the group share the work.
        progress: show a progress bar, on the first rank.

    Raises:
        InputError: the verb cannot be executed in this way, or arguments that do not go together.
    """
    if offload:
        support.check(offload=True)
        yield Offloaded(support, *_offloaded(model, memory, work, dtype, parallel), shown=progress)
        return
    if memory is not None or work is not None:
        raise InputError("memory and work go with offload: without it the model is loaded whole. Add offload=True.")
    if parallel in PARALLEL_MODES:
        support.check(parallel=parallel)
    mode = parallel_mode(model, parallel)
    support.check(parallel=mode)  # a module may be spread already, without being asked
    with sharing(mode) as share:
        yield InMemory(support, share.load(model, seed=seed, dtype=dtype), share, shown=progress)


def _offloaded(
    model: str | Path | nn.Module,
    memory: int | str | None,
    work: str | Path | None,
    dtype: torch.dtype | str | None,
    parallel: Parallel | None,
) -> tuple[MetaModel, OffloadLimits]:
    if isinstance(model, nn.Module):
        raise InputError(
            f"offload reads weights from a local folder as it goes; {type(model).__name__} is in memory already. Leave "
            "offload out, or pass the folder."
        )
    if parallel is not None:
        raise InputError(
            f"offload works in one process, and parallel={parallel!r} was asked for. Leave one of them out."
        )
    if memory is not None:
        parse_size(memory)
    return open_meta_model(model, dtype=dtype), OffloadLimits(memory, work)


def declared_or_offloaded(stream: Stream | str | bool | None, offload: bool) -> tuple[Stream | None, bool]:
    """What ``stream`` and ``offload`` ask for; ``stream=True`` is the earlier spelling of ``offload=True``.

    Raises:
        InputError: ``stream`` is neither a declaration nor a truth value.
    """
    if not isinstance(stream, bool):
        return stream_of(stream), offload
    warnings.warn(
        f"stream={stream} is now offload={stream}; stream= declares where the residual stream is.",
        DeprecationWarning,
        stacklevel=3,
    )
    return None, offload or stream


def _need_weights(model: nn.Module, verb: str) -> None:
    """Make sure that all weights of a loaded model can be read.

    Raises:
        UnsupportedConfigError: some are elsewhere until their module runs.
    """
    away = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if away is not None:
        raise UnsupportedConfigError(
            f"{verb} computes with the weights themselves, and {away} is offloaded (device_map). Pass the folder with "
            "offload=True instead, which has one block at a time in memory; measure and ablate take the model as it is."
        )
