"""The cheap battery of one forward pass, reduced to a few numbers per layer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import pyarrow as pa
from torch import Tensor

from rankscope._types import Status
from rankscope.metrics import METRICS, MetricSpec
from rankscope.models.inputs import Batch, TokensPolicy
from rankscope.models.view import ModelView
from rankscope.monitor.isolation import full_precision
from rankscope.runs.readings import LayerValue
from rankscope.runs.rows import RowWriter
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import trace
from rankscope.verbs.reader import SiteReader

DEFAULT_METRICS = (
    "relative_residual",
    "mean_cosine",
    "stable_rank",
    "largest_token_share",
    "largest_channel_share",
    "attention_entropy",
)
"""What a gauge takes when nothing is named: norms, one Gram matrix per layer, and the entropy of attention."""

_WORTH = (str(Status.OK), str(Status.FLOOR))


def chosen_metrics(names: Sequence[str] | None) -> tuple[MetricSpec, ...]:
    """The specs of these names, each once; the default battery for None."""
    return tuple(METRICS[name] for name in dict.fromkeys(DEFAULT_METRICS if names is None else names))


class Battery:
    """Reads the streams after every block, and attention, of one forward pass.

    Args:
        specs: what to take.
        policy: which tokens count.
    """

    def __init__(self, specs: Sequence[MetricSpec], policy: TokensPolicy) -> None:
        sides = {spec.side for spec in specs}
        words = [word for word, side in (("block.out", "tokens"), ("attention.probs", "attention")) if side in sides]
        self.specs = tuple(specs)
        self.selection = SiteSelection.parse(words)
        self._policy = policy
        self.shapes: set[tuple[int, int]] = set()
        self._start_over()

    def _start_over(self) -> None:
        self._writer = RowWriter()
        self._reader = SiteReader(self.specs, self._policy, self._writer)

    def reading(self, view: ModelView, batch: Batch) -> AbstractContextManager[None]:
        """Read the forward pass of ``batch`` that happens inside the ``with`` block."""
        self.begin(batch)
        return trace(view, self.selection, self.observe)

    def begin(self, batch: Batch) -> None:
        """The next forward pass is of this batch."""
        self._reader.start(batch)

    def observe(self, ref: SiteRef, seen: Tensor | AttentionCall) -> None:
        """Reduce what is seen at a site, now."""
        tensor = seen if isinstance(seen, Tensor) else seen.weights if seen.weights is not None else seen.query
        assert tensor is not None
        with full_precision(tensor):
            self._reader(ref, seen)

    def values(self) -> tuple[LayerValue, ...]:
        """What was read since the last call, per metric and layer."""
        table = self._writer.table()
        self.shapes |= self._reader.shapes
        self._start_over()
        return layer_values(table)


def layer_values(table: pa.Table) -> tuple[LayerValue, ...]:
    """Mean, least and most over the sequences and heads of each metric, site and layer."""
    groups: dict[tuple[str, str, str | None, int], list[tuple[float, str]]] = {}
    columns = [table[name].to_pylist() for name in ("metric", "site", "stack", "layer", "value", "status")]
    for metric, site, stack, layer, value, status in zip(*columns, strict=True):
        groups.setdefault((metric, site, stack, layer), []).append((value, status))
    return tuple(_summary(key, entries) for key, entries in groups.items())


def _summary(key: tuple[str, str, str | None, int], entries: list[tuple[float, str]]) -> LayerValue:
    statuses = [status for _, status in entries]
    status = max(dict.fromkeys(statuses), key=statuses.count)
    worth = np.array([value for value, status in entries if status in _WORTH], dtype=np.float64)
    if worth.size == 0:
        return LayerValue(*key, np.nan, np.nan, np.nan, status)
    if status not in _WORTH:
        status = str(Status.OK)
    return LayerValue(*key, float(worth.mean()), float(worth.min()), float(worth.max()), status)
