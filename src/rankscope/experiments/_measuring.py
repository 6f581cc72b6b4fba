"""One network after the other, measured into one table with further columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from rankscope.metrics import METRICS
from rankscope.models.inputs import Prepared
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.results.rows import RowWriter
from rankscope.stream.sites import SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import undisturbed, view_of
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.verbs.reader import SiteReader

SITES = ("block.in@0", "block.out")


def measure_network(
    model: nn.Module,
    prepared: Prepared,
    operation: Operation,
    *,
    metrics: Sequence[str],
    writer: RowWriter,
    at: Mapping[str, str | int | None],
) -> SiteReader:
    """Run ``model`` under ``operation`` and write ``metrics`` before the first block and after each.

    The structure is looked up before anything is cut, so that every skip is seen.

    Raises:
        UnsupportedOperationError: the model cannot undergo it.
    """
    reader = SiteReader([METRICS[name] for name in metrics], prepared.policy, writer, at)
    with undisturbed(model), quiet_transformers():
        view = view_of(model, prepared[0])
        with operating(model, operation, view=view), trace(view, SiteSelection.parse(SITES), reader):
            for part in prepared:
                reader.start(part)
                part.run(model)
    return reader
