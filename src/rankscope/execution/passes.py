"""The loop of a verb, the same whether the model is in memory, read block by block, or shared by several ranks.

.. code-block:: python

    with executing(MEASURE.execution, model, surgery) as execution:
        view = execution.plan(prepared)
        with execution.stages() as stages:
            for stage in stages:
                with trace(stage.view, sites, execution.watch(reader)):
                    for part in execution.batches():
                        with stage.through(part):
                            part.run(view.model)
        execution.collect(findings, order)

A stage is the part of the model that runs at once: the whole model if it is in memory, one block if it is offloaded.
``batches`` are all batches, or those of this rank. After ``collect``, rows and order are the same in every case. From
``plan`` on, the model runs under the surgery of the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from rankscope._registry import Registry
from rankscope.errors import InputError, RankscopeError, UnsupportedConfigError
from rankscope.execution.findings import Findings
from rankscope.execution.ranks import RankShare, parallel_mode, sharing
from rankscope.execution.support import ExecutionSupport
from rankscope.linalg.precision import has_float64, lowered_products
from rankscope.models.inputs import Batch, Prepared
from rankscope.models.linear_maps import absence_of
from rankscope.models.loading import LoadedModel
from rankscope.models.loading.devices import device_of, moved_to
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.model import Model, ModelLike, as_model
from rankscope.models.view import ModelView
from rankscope.models.wrapping import spread_of
from rankscope.runs.rows import Piece
from rankscope.stream.tracer import Observer
from rankscope.stream.viewing import probe_batch, undisturbed, view_and_batches
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.surgery.surgery import SurgeryLike, as_surgery


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


class Execution(ABC):
    """How the forward passes of one call of a verb are run; see the module for the loop.

    Args:
        support: the declaration of the verb.
        model: the model as the user wants it to be run.
        loaded: the module and the facts about it.
        operation: the surgery under which it runs.
        shown: whether to show a progress bar.

    Attributes:
        prepared: the inputs passed to :meth:`plan`. In memory, a verb may replace them by the same inputs in other
            batches.
    """

    prepared: Prepared

    def __init__(
        self, support: ExecutionSupport, model: Model, loaded: LoadedModel, operation: Operation, *, shown: bool
    ) -> None:
        self.verb = support.verb
        self._support = support
        self.model = model
        self.loaded = loaded
        self._operation = operation
        self._shown = shown
        self._operated: list[nn.Module] = []
        self._open = ExitStack()

    def close(self) -> None:
        """End the surgery."""
        self._open.close()

    def _operate(self, view: ModelView) -> None:
        """Run this model under the surgery until the execution is closed; a verb may plan the same model again."""
        if self._operation.describe() and not any(model is view.model for model in self._operated):
            self._open.enter_context(operating(view.model, self._operation, view=view))
            self._operated.append(view.model)

    def plan(
        self,
        prepared: Prepared,
        *,
        model: nn.Module | None = None,
        variants: int = 1,
        reads_weights: bool = False,
    ) -> ModelView:
        """Discover the structure of the model, and prepare to run it on these inputs.

        Args:
            prepared: the inputs.
            model: model to run instead of the loaded one (a randomly initialised copy); in memory only.
            variants: number of networks that run side by side.
            reads_weights: whether the verb computes with the weights themselves, in float64.
        """
        self.prepared = prepared
        return self._view_for(model, variants, reads_weights)

    @abstractmethod
    def _view_for(self, model: nn.Module | None, variants: int, reads_weights: bool) -> ModelView:
        """The structure of the model, once ``prepared`` is set."""

    @abstractmethod
    def stages(self, *, passes: int = 1, final: bool = False) -> AbstractContextManager[Iterable[Stage]]:
        """The stages, in order; the model is in evaluation mode meanwhile, and restored afterwards.

        Args:
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
        model: the model as the user wants it to be run.
        loaded: the module and the facts about it.
        operation: the surgery under which it runs.
        share: the share of this process.
        shown: whether to show a progress bar.
    """

    def __init__(
        self,
        support: ExecutionSupport,
        model: Model,
        loaded: LoadedModel,
        operation: Operation,
        share: RankShare,
        *,
        shown: bool,
    ) -> None:
        super().__init__(support, model, loaded, operation, shown=shown and share.is_first)
        self._share = share
        self._view: ModelView | None = None
        self._bar: tqdm[Any] | None = None

    def _view_for(self, model: nn.Module | None, variants: int, reads_weights: bool) -> ModelView:
        """Discover the structure."""
        model = self.loaded.model if model is None else model
        if reads_weights:
            _need_weights(model, self._support)
        with undisturbed(model), quiet_transformers():
            self._share.before_discovery(self.prepared)
            try:
                self._view, batches = view_and_batches(
                    model, tuple(self.prepared), blocks=self.model.blocks, stream=self.model.declared_stream
                )
            except RankscopeError:
                raise
            except Exception as error:
                why = _cannot_be_cut(model, self.prepared[0]) if self._share.is_alone else None
                if why is None:
                    raise
                raise why from error
            self.prepared = replace(self.prepared, batches=batches)
        self._operate(self._view)
        return self._view

    @contextmanager
    def stages(self, *, passes: int = 1, final: bool = False) -> Iterator[Iterable[Stage]]:
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


EXECUTIONS: Registry[Callable[[ExecutionSupport, Model, Operation, bool], Execution]] = Registry("execution")
"""Further ways to run a model, by the argument that asks for them. The last argument is whether to show progress."""


@contextmanager
def executing(
    support: ExecutionSupport, model: ModelLike, surgery: SurgeryLike = None, *, progress: bool = False
) -> Iterator[Execution]:
    """Load a model, or open it without its weights if it is offloaded.

    Args:
        support: the declaration of the verb.
        model: what to run, and how.
        surgery: under which it runs, from :meth:`Execution.plan` on.
        progress: show a progress bar, on the first rank.

    Raises:
        InputError: the verb does not support this, or the arguments contradict each other.
    """
    chosen, operation = as_model(model), as_surgery(surgery).operation
    if chosen.offload:
        support.check(offload=True)
        with closing(EXECUTIONS["offload"](support, chosen, operation, progress)) as execution:
            yield execution
        return
    if chosen.memory is not None:
        raise InputError("memory needs offload: without it the whole model is loaded. Add offload=True.")
    if chosen.parallel is not None:
        support.check(parallel=chosen.parallel)
    spread = spread_of(chosen.source) if isinstance(chosen.source, nn.Module) else None
    mode = parallel_mode(chosen.parallel, is_module=chosen.is_module, spread=spread)
    support.check(parallel=mode)  # checked again: the user's module may already be sharded
    with sharing(mode) as share:
        loaded = replace(chosen.loaded_with(None if chosen.is_module else share.spread), gather=share.gather)
        with (
            _able(loaded, support) as able,
            closing(InMemory(support, chosen, able, operation, share, shown=progress)) as execution,
        ):
            yield execution


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
    with moved_to(loaded.model, home):
        yield replace(loaded, device=str(home), notes=(*loaded.notes, note))


def _cannot_be_cut(model: nn.Module, batch: Batch) -> InputError | None:
    """An error for a model that runs on a batch, but not on two of its sequences; None for any other."""
    small, count = probe_batch(batch, whole=True)
    batch.call(model)  # if this fails too, the model's own error is the right one
    try:
        small.call(model)
    except Exception as error:  # noqa: BLE001  (whatever it raises is reported)
        told = " ".join(str(error).split())[:300].rstrip(".")
        return InputError(
            f"{type(model).__name__} runs on these {batch.sequences} sequences, but not on {count} of them, on which "
            f"its blocks are found: {type(error).__name__}: {told}. If several rows are parts of one sequence, such as "
            "the frames of a video, pass a module whose forward takes one row per sequence and splits it."
        )
    return None


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
