"""Measures networks one after the other into one table with additional columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from rankscope.ext.papers.measuring.parts import Coordinates
from rankscope.metrics import METRICS
from rankscope.models.inputs import Batch, Prepared
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.view import ModelView
from rankscope.runs.rows import RowWriter
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import Observed, trace
from rankscope.stream.viewing import undisturbed, view_of
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.verbs.reader import SiteReader

SITES = SiteSelection.parse(("block.in@0", "block.out"))


def measure_network(
    model: nn.Module,
    prepared: Prepared,
    operation: Operation,
    *,
    metrics: Sequence[str],
    writer: RowWriter,
    at: Coordinates,
    beside: Callable[[SiteRef, Tensor, Batch], None] | None = None,
    view: ModelView | None = None,
) -> SiteReader:
    """Run ``model`` under ``operation`` and write ``metrics`` before the first block and after each.

    The structure is discovered before anything is cut, so that every skip is seen.

    Args:
        model: the whole model.
        prepared: its inputs.
        operation: the surgery.
        metrics: token metrics.
        writer: takes the rows.
        at: values of the writer's additional columns.
        beside: also called with each tensor, for a number that is not a registered metric.
        view: the structure, if it is known.

    Raises:
        UnsupportedOperationError: the model does not support the surgery.
    """
    reader = SiteReader([METRICS[name] for name in metrics], prepared.policy, writer, dict(at))
    with undisturbed(model), quiet_transformers():
        view = view_of(model, prepared[0]) if view is None else view
        for part in prepared:
            reader.start(part)

            def observe(ref: SiteRef, seen: Observed, part: Batch = part) -> None:
                reader(ref, seen)
                if beside is not None and isinstance(seen, Tensor):
                    beside(ref, seen, part)

            with operating(model, operation, view=view), trace(view, SITES, observe):
                part.run(model)
    return reader
