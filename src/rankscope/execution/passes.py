"""The loop of a verb, the same whether the model is in memory, read block by block, or shared by several ranks.

.. code-block:: python

    with executing(MEASURE.execution, model, how) as execution:
        view = execution.plan(prepared, identity, blocks=blocks, stream=stream)
        with execution.stages(findings) as stages:
            for stage in stages:
                with trace(stage.view, sites, execution.watch(reader)):
                    for part in execution.batches():
                        with stage.through(part):
                            part.run(view.model)
        execution.collect(findings, order)

A stage is the part of the model that runs at once: the whole model if it is in memory, one block if it is offloaded.
``batches`` are all batches, or those of this rank. After ``collect``, rows and order are the same in every case.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
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
from rankscope.linalg.precision import has_float64, lowered_products
from rankscope.models.inputs import Batch, Prepared
from rankscope.models.linear_maps import absence_of
from rankscope.models.loading import LoadedModel, load
from rankscope.models.loading.devices import device_of, held_on
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.stream import Stream, stream_of
from rankscope.models.view import ModelView
from rankscope.models.weight_files.files import Traffic
from rankscope.models.wrapping import spread_of
from rankscope.runs.rows import Piece
from rankscope.stream.tracer import Observer
from rankscope.stream.viewing import undisturbed, view_and_batches


class Stage(Protocol):
    """The part of a model that runs at once; see the module docstring."""

    @property
    def view(self) -> ModelView:
        """The model, seen as if this part were all of it."""

    def through(self, part: Batch, variant_key: str = "", *, keep: bool = True) -> AbstractContextManager[None]:
        """Inside this context, a forward pass of the model on ``part`` is a pass of this stage.

        Args:
            part: the batch.
            variant_key: names the network the residual stream belongs to, if several run side by side.
            keep: whether the next stage starts from the output; False for a pass that will be repeated.
        """

    def left(self, part: Batch, variant_key: str = "") -> Tensor | None:
        """The residual stream after the previous stage; None in the first stage."""


@dataclass(frozen=True)
class WholeModel:
    """The only stage of a model in memory."""

    view: ModelView

    def through(self, part: Batch, variant_key: str = "", *, keep: bool = True) -> AbstractContextManager[None]:
        """Nothing to restore: a pass of this stage is a pass of the model."""
        return nullcontext()

    def left(self, part: Batch, variant_key: str = "") -> Tensor | None:
        """There is no previous stage."""
        return None


@dataclass(frozen=True)
class PassPlan:
    """The arguments of :meth:`Execution.plan` besides the inputs."""

    identity: tuple[Any, ...]
    blocks: str | Sequence[str] | None
    stream: Stream | None
    model: nn.Module | None
    variants: int
    reads_weights: bool


class Execution(ABC):
    """How the forward passes of one call of a verb are run; see the module for the loop.

    Args:
        support: the declaration of the verb.
        loaded: the model and the facts about it.
        shown: whether to show a progress bar.

    Attributes:
        prepared: the inputs passed to :meth:`plan`. In memory, a verb may replace them by the same inputs in other
            batches.
    """

    prepared: Prepared

    def __init__(self, support: ExecutionSupport, loaded: LoadedModel, *, shown: bool) -> None:
        self.verb = support.verb
        self._support = support
        self.loaded = loaded
        self._shown = shown

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
        """Discover the structure of the model, and prepare to run it on these inputs.

        Args:
            prepared: the inputs.
            identity: everything besides the model and its inputs that determines the values, so that a killed
                offloaded run is resumed only by the same call.
            blocks: names or patterns of the block modules, if discovery needs help.
            stream: where the residual stream is, if it was declared.
            model: model to run instead of the loaded one (a randomly initialised copy); in memory only.
            variants: number of networks that run side by side.
            reads_weights: whether the verb computes with the weights themselves, in float64.
        """
        self.prepared = prepared
        return self._view_for(PassPlan(identity, blocks, stream, model, variants, reads_weights))

    @abstractmethod
    def _view_for(self, plan: PassPlan) -> ModelView:
        """The structure of the model, once ``prepared`` is set."""

    @abstractmethod
    def stages(
        self, findings: Findings, *, passes: int = 1, final: bool = False
    ) -> AbstractContextManager[Iterable[Stage]]:
        """The stages, in order; the model is in evaluation mode meanwhile, and restored afterwards.

        Args:
            findings: the results; saved after each block if the model is offloaded with a work folder.
            passes: how many times the verb iterates over :meth:`batches` in a stage, for the progress bar.
            final: whether the final norm, if there is one, must run too.
        """

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """The batches of this process, in order; requesting the next one marks a batch as done."""

    def watch(self, observe: Observer) -> Observer:
        """The observer to pass to the tracer; needed if the model may be sharded over ranks."""
        return observe

    def collect(self, findings: Findings, order: Callable[[Piece], Any] = lambda piece: piece.first_sequence) -> None:
        """Merge the results of all ranks, on every rank, with the rows in the order of a single process.

        Args:
            findings: the results of this process; those of all processes afterwards.
            order: sort key of the rows; rows of one batch stay as they were written.
        """
        findings.arrange(order)

    def from_first(self, act: Callable[[], Any]) -> Any:
        """Call ``act`` on the first rank and return its result on every rank; it must be JSON."""
        return act()

    @property
    def is_in_memory(self) -> bool:
        """Whether the whole model can be run again."""
        return True

    @property
    def ends_batch_by_batch(self) -> bool:
        """Whether each batch is finished before the next one, so that an interrupt leaves complete results."""
        return True

    @property
    @abstractmethod
    def described(self) -> dict[str, Any]:
        """What a run records about its execution; empty for one process with the model in memory."""


class InMemory(Execution):
    """The model is in memory, whole or this rank's part of it.

    Args:
        support: the declaration of the verb.
        loaded: the model and the facts about it.
        share: the share of this process.
        shown: whether to show a progress bar.
    """

    def __init__(self, support: ExecutionSupport, loaded: LoadedModel, share: RankShare, *, shown: bool) -> None:
        super().__init__(support, loaded, shown=shown and share.is_first)
        self._share = share
        self._view: ModelView | None = None
        self._bar: tqdm[Any] | None = None

    def _view_for(self, plan: PassPlan) -> ModelView:
        """Discover the structure."""
        model = self.loaded.model if plan.model is None else plan.model
        if plan.reads_weights:
            _need_weights(model, self._support)
        with undisturbed(model), quiet_transformers():
            self._share.before_discovery(self.prepared)
            self._view, batches = view_and_batches(model, tuple(self.prepared), blocks=plan.blocks, stream=plan.stream)
            self.prepared = replace(self.prepared, batches=batches)
        return self._view

    @contextmanager
    def stages(self, findings: Findings, *, passes: int = 1, final: bool = False) -> Iterator[Iterable[Stage]]:
        """One stage, which is the whole model."""
        assert self._view is not None
        # Only the batches that this rank observes: an FSDP rank may run one more pass, which is not counted.
        total = passes * len(self._share.own(self.prepared))
        self._bar = tqdm(total=total, desc=self.verb, unit="batch", disable=not self._shown)
        with self._bar, undisturbed(self._view.model), quiet_transformers():
            yield (WholeModel(self._view),)

    def batches(self) -> Iterator[Batch]:
        """All batches, or those of this rank."""
        assert self._view is not None
        model = self._view.model
        for part in self._share.batches(self.prepared, lambda part: part.run(model)):
            yield part
            # Resumed when the caller asks for the next batch, so this one is done.
            if self._bar is not None:
                self._bar.update()

    def watch(self, observe: Observer) -> Observer:
        """An observer whose errors do not make other ranks hang."""
        return self._share.watch(observe)

    def collect(self, findings: Findings, order: Callable[[Piece], Any] = lambda piece: piece.first_sequence) -> None:
        """Gather the findings of all ranks."""
        # Gathering concatenates the rows rank by rank; the sort below restores the order of a single process.
        self._share.collect(findings, self.loaded)
        super().collect(findings, order)

    def from_first(self, act: Callable[[], Any]) -> Any:
        """Call ``act`` on the first rank only."""
        return self._share.from_first(act)

    @property
    def ends_batch_by_batch(self) -> bool:
        """Only without other ranks: they would wait for this one."""
        return self._share.is_alone

    @property
    def described(self) -> dict[str, Any]:
        """The number of processes, if there were several."""
        return self._share.described


class Offloaded(Execution):
    """Only the weights of one block at a time are in memory, read from a local folder.

    Args:
        support: the declaration of the verb.
        meta_model: the model without its weights.
        limits: memory budget and work folder, as set by the user.
        shown: whether to show a progress bar.
    """

    def __init__(self, support: ExecutionSupport, meta_model: MetaModel, limits: OffloadLimits, *, shown: bool) -> None:
        super().__init__(support, meta_model.loaded, shown=shown)
        self._meta_model, self._limits = meta_model, limits
        self._schedule: BlockSchedule | None = None

    def _view_for(self, plan: PassPlan) -> ModelView:
        """Discover the structure without weights, and check the memory budget."""
        assert plan.model is None or plan.model is self.loaded.model
        options = [str(option) for option in (self.verb, *plan.identity)]
        # These decide the name of the work folder, so that a killed run is never resumed with other settings.
        named = {"options": options, "dtype": self.loaded.dtype, "blocks": plan.blocks}
        if plan.stream is not None:
            named["stream"] = str(plan.stream)
        self._schedule = plan_schedule(
            self._meta_model,
            self.prepared,
            self._limits,
            options=named,
            blocks=plan.blocks,
            stream=plan.stream,
            variants=plan.variants,
            widened=plan.reads_weights,
        )
        return self._schedule.view

    @contextmanager
    def stages(self, findings: Findings, *, passes: int = 1, final: bool = False) -> Iterator[Iterable[Stage]]:
        """One stage per block, and one for the final norm."""
        assert self._schedule is not None
        # The generator holds open files, hooks and weights; close it even if the verb stops early.
        with closing(self._schedule.stages(findings, final=final)) as stages:
            yield self._counted(stages)

    def _counted(self, stages: Iterator[BlockStage]) -> Iterator[Stage]:
        assert self._schedule is not None
        depth = self._schedule.view.depth
        traffic = self._meta_model.folder.traffic
        if traffic is not None:
            yield from self._counted_in_bytes(stages, traffic)
            return
        with tqdm(total=depth, desc=self.verb, unit="block", disable=not self._shown) as bar:
            for stage in stages:
                bar.update(stage.number - bar.n)  # not 1: a resumed run starts at a later block
                yield stage
            bar.update(depth - bar.n)

    def _counted_in_bytes(self, stages: Iterator[BlockStage], traffic: Traffic) -> Iterator[Stage]:
        """What is read from a server takes most of the time, so the bar shows bytes."""
        assert self._schedule is not None
        depth, total = self._schedule.view.depth, self._schedule.bytes_of_blocks
        bytes_bar = tqdm(
            total=total, desc=self.verb, unit="B", unit_scale=True, unit_divisor=1024, disable=not self._shown
        )
        with bytes_bar as bar, traffic.watched(bar.update):
            for stage in stages:
                bar.set_postfix_str(f"block {min(stage.number + 1, depth)}/{depth}", refresh=False)
                yield stage

    def batches(self) -> Iterator[Batch]:
        """All batches."""
        yield from self.prepared

    @property
    def is_in_memory(self) -> bool:
        """Only one block is in memory."""
        return False

    @property
    def ends_batch_by_batch(self) -> bool:
        """All batches end together, with the last block."""
        return False

    @property
    def described(self) -> dict[str, Any]:
        """How often blocks were read, and the memory estimate."""
        schedule = self._schedule
        if schedule is None:
            return {}
        return {
            "offload": {
                "blocks_read": schedule.tally["blocks_read"],
                "resumed_at": schedule.tally["resumed_at"],
                "states_in_memory": schedule.in_memory,
                "estimated_bytes": schedule.need.total(in_memory=schedule.in_memory),
                **({"by_expert": True} if schedule.by_expert else {}),
                **({} if self._meta_model.folder.traffic is None else self._meta_model.folder.traffic.described),
            }
        }


@dataclass(frozen=True)
class HowToRun:
    """How the user wants a model to be loaded and run; the arguments that all model verbs have in common.

    Attributes:
        seed: seed for a random initialisation.
        dtype: dtype of the weights, if they are loaded here.
        device: device of the weights, if they are loaded here.
        parallel: how the processes of the group share the work.
        progress: show a progress bar, on the first rank.
        offload: read a local folder, the hub or a server block by block.
        memory: with ``offload``, the memory budget.
        work: with ``offload``, the folder for checkpoints.
        byte_budget: with ``offload``, the largest number of bytes to read from a server.
    """

    seed: int
    dtype: torch.dtype | str | None
    device: torch.device | str | None
    parallel: Parallel | None
    progress: bool
    offload: bool
    memory: int | str | None = None
    work: str | Path | None = None
    byte_budget: int | str | None = None


@contextmanager
def executing(support: ExecutionSupport, model: str | Path | nn.Module, how: HowToRun) -> Iterator[Execution]:
    """Load a model, or open it without its weights if it is offloaded.

    Raises:
        InputError: the verb does not support this, or the arguments contradict each other.
    """
    limits, parallel = OffloadLimits(how.memory, how.work, how.byte_budget), how.parallel
    if how.offload:
        support.check(offload=True)
        if how.device is not None:
            raise InputError("offload runs each block on the processor. Leave device out.")
        yield Offloaded(support, _offloaded(model, limits, how.dtype, parallel), limits, shown=how.progress)
        return
    if limits != OffloadLimits():
        raise InputError(
            "memory, work and byte_budget need offload: without it the whole model is loaded. Add offload=True."
        )
    if parallel in PARALLEL_MODES:
        support.check(parallel=parallel)
    spread = spread_of(model) if isinstance(model, nn.Module) else None
    mode = parallel_mode(parallel, is_module=isinstance(model, nn.Module), spread=spread)
    support.check(parallel=mode)  # checked again: the user's module may already be sharded
    with sharing(mode) as share:
        to_spread = None if isinstance(model, nn.Module) else share.spread
        loaded = load(model, seed=how.seed, dtype=how.dtype, device=how.device, spread=to_spread)
        with _able(loaded, support) as able:
            yield InMemory(support, able, share, shown=how.progress)


@contextmanager
def _able(loaded: LoadedModel, support: ExecutionSupport) -> Iterator[LoadedModel]:
    """The model on a device that can run the verb: its own, or the CPU if the verb needs float64 and it has none."""
    device = device_of(loaded.model.parameters())
    lowered = lowered_products(device)
    if lowered is not None:
        note = f"torch rounds the factors of float32 products to {lowered} here (torch.set_float32_matmul_precision)"
        loaded = replace(loaded, notes=(*loaded.notes, f"{note}; the float floor does not include that rounding."))
    if not support.in_float64 or has_float64(device):
        yield loaded
        return
    home = torch.device("cpu")
    note = f"{device} has no float64, in which {support.verb} computes: it ran on a copy of the model on the processor."
    with held_on(loaded.model, home):
        yield replace(loaded, device=str(home), notes=(*loaded.notes, note))


def _offloaded(
    model: str | Path | nn.Module, limits: OffloadLimits, dtype: torch.dtype | str | None, parallel: Parallel | None
) -> MetaModel:
    if isinstance(model, nn.Module):
        raise InputError(
            f"offload reads weights from a folder while it runs; {type(model).__name__} is already in memory. "
            "Leave offload out, or pass the folder."
        )
    if parallel is not None:
        raise InputError(
            f"offload works in one process, so it cannot be combined with parallel={parallel!r}. Leave one out."
        )
    if limits.memory is not None:
        parse_size(limits.memory)
    budget = None if limits.byte_budget is None else parse_size(limits.byte_budget, "byte_budget")
    return open_meta_model(model, dtype=dtype, byte_budget=budget)


def declared_or_offloaded(stream: Stream | str | bool | None, offload: bool) -> tuple[Stream | None, bool]:
    """The declared stream and whether to offload; ``stream=True`` is the old spelling of ``offload=True``.

    Raises:
        InputError: ``stream`` is neither a declaration nor a bool.
    """
    if not isinstance(stream, bool):
        return stream_of(stream), offload
    warnings.warn(
        f"stream={stream} is now offload={stream}; stream= declares where the residual stream is.",
        DeprecationWarning,
        stacklevel=3,
    )
    return None, offload or stream


def _need_weights(model: nn.Module, support: ExecutionSupport) -> None:
    """Check that all weights of a loaded model can be read.

    Raises:
        UnsupportedConfigError: some are elsewhere until their module runs.
    """
    for name, parameter in model.named_parameters():
        absent = absence_of(parameter)
        if absent is None:
            continue
        advice = "Load the whole model in one process"
        if support.no_offload is None and parameter.is_meta:
            advice = "Pass the folder with offload=True instead, which loads one block at a time"
        raise UnsupportedConfigError(
            f"{support.verb} computes with the weights themselves, but {name} {absent}. {advice}; measure and ablate "
            "accept the model as it is."
        )
