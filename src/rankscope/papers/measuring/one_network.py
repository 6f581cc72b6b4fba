"""One network after the other, measured into one table with further columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from rankscope.metrics import METRICS
from rankscope.models.inputs import Batch, Prepared
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.view import ModelView
from rankscope.runs.rows import RowWriter
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import undisturbed, view_of
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.verbs.reader import SiteReader

SITES = ("block.in@0", "block.out")
Beside = Callable[[SiteRef, Tensor, Batch], None]


def measure_network(
    model: nn.Module,
    prepared: Prepared,
    operation: Operation,
    *,
    metrics: Sequence[str],
    writer: RowWriter,
    at: Mapping[str, str | int | None],
    beside: Beside | None = None,
    view: ModelView | None = None,
) -> SiteReader:
    """Run ``model`` under ``operation`` and write ``metrics`` before the first block and after each.

    The structure is looked up before anything is cut, so that every skip is seen.

    Args:
        model: the whole model.
        prepared: its inputs.
        operation: what is done to it.
        metrics: token metrics.
        writer: where rows go.
        at: values of the writer's further columns.
        beside: also called with each tensor, for a number that is no metric.
        view: the structure, where it is known from the network before.

    Raises:
        UnsupportedOperationError: the model cannot undergo it.
    """
    reader = SiteReader([METRICS[name] for name in metrics], prepared.policy, writer, at)
    selection = SiteSelection.parse(SITES)
    with undisturbed(model), quiet_transformers():
        view = view_of(model, prepared[0]) if view is None else view
        for part in prepared:
            reader.start(part)
            with operating(model, operation, view=view), trace(view, selection, _both(reader, beside, part)):
                part.run(model)
    return reader


def _both(reader: SiteReader, beside: Beside | None, part: Batch) -> Callable[[SiteRef, Tensor | AttentionCall], None]:
    if beside is None:
        return reader

    def observe(ref: SiteRef, seen: Tensor | AttentionCall) -> None:
        reader(ref, seen)
        if isinstance(seen, Tensor):
            beside(ref, seen, part)

    return observe
