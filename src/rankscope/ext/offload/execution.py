"""The execution of a verb on a model of which only one block is in memory."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from torch import nn
from tqdm.auto import tqdm

from rankscope.errors import InputError
from rankscope.execution.budget import parse_size
from rankscope.execution.passes import EXECUTIONS, Execution, Stage
from rankscope.execution.support import ExecutionSupport
from rankscope.ext.offload.meta_model import MetaModel, open_meta_model
from rankscope.ext.offload.schedule import BlockSchedule, BlockStage, plan_schedule
from rankscope.models.inputs import Batch
from rankscope.models.loading import LoadedModel
from rankscope.models.model import Model
from rankscope.models.view import ModelView
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.surgery.refusals import check_operable


class Offloaded(Execution):
    """Only the weights of one block at a time are in memory, read from a local folder.

    Args:
        support: the declaration of the verb.
        model: the model as the user wants it to be run, with memory budget.
        meta_model: the model without its weights.
        operation: the surgery under which it runs.
        shown: whether to show a progress bar.
    """

    def __init__(
        self, support: ExecutionSupport, model: Model, meta_model: MetaModel, operation: Operation, *, shown: bool
    ) -> None:
        super().__init__(support, model, meta_model.loaded, operation, shown=shown)
        self._meta_model = meta_model
        self._schedule: BlockSchedule | None = None

    def _view_for(self, model: nn.Module | None, variants: int, reads_weights: bool) -> ModelView:
        """Discover the structure without weights, and check the memory budget."""
        assert model is None or model is self.loaded.model
        self._schedule = plan_schedule(
            self._meta_model,
            self.prepared,
            self.model.memory,
            blocks=self.model.blocks,
            stream=self.model.declared_stream,
            variants=variants,
            widened=reads_weights,
        )
        check_operable(self._operation, self._schedule.view)
        return self._schedule.view

    @contextmanager
    def stages(self, *, passes: int = 1, final: bool = False) -> Iterator[Iterable[Stage]]:
        """One stage per block, and one for the final norm."""
        assert self._schedule is not None
        # The generator holds open files, hooks and weights; close it even if the verb stops early.
        with (
            closing(self._schedule.stages(final=final)) as stages,
            closing(self._changed(self._counted(stages))) as changed,
        ):
            yield changed
        # What was done is read from the model when the run is recorded.
        self._operate(self._schedule.view)

    def _changed(self, stages: Iterator[Stage]) -> Generator[Stage, None, None]:
        """The stages, each under the surgery."""
        for stage in stages:
            if not self._operation.describe():
                yield stage
                continue
            with operating(stage.view.model, self._operation, view=stage.view):
                yield stage

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
                "states_in_memory": schedule.in_memory,
                "estimated_bytes": schedule.need.total(in_memory=schedule.in_memory),
                **({} if self._meta_model.folder.traffic is None else self._meta_model.folder.traffic.described),
            }
        }


def offloaded(support: ExecutionSupport, model: Model, operation: Operation, shown: bool) -> Offloaded:
    """Open a model without its weights.

    Raises:
        InputError: the arguments contradict each other.
    """
    if model.device is not None:
        raise InputError("offload runs each block on the processor. Leave device out.")
    if isinstance(model.source, nn.Module):
        raise InputError(
            f"offload reads weights from a folder while it runs; {type(model.source).__name__} is already in memory. "
            "Leave offload out, or pass the folder."
        )
    if isinstance(model.source, LoadedModel):
        raise InputError(f"offload reads weights from a folder while it runs; {model.source.spec} is already loaded.")
    if model.parallel is not None:
        raise InputError(
            f"offload works in one process, so it cannot be combined with parallel={model.parallel!r}. Leave one out."
        )
    if model.memory is not None:
        parse_size(model.memory)
    meta_model = open_meta_model(model.source, dtype=model.dtype)
    return Offloaded(support, model, meta_model, operation, shown=shown)


EXECUTIONS.add("offload", offloaded)
