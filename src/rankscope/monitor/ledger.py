"""Who collapses the stream: the relative residual before and after every add and norm, in one pass of the probe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankscope.metrics import METRICS
from rankscope.models.inputs import Batch, TokensPolicy
from rankscope.models.view import ModelView
from rankscope.monitor.battery import layer_values
from rankscope.runs.rows import RowWriter
from rankscope.stream.sites import SiteSelection
from rankscope.stream.tracer import trace
from rankscope.verbs.reader import SiteReader

_BRANCHES = ("attention", "cross_attention", "mixer", "mlp", "both")
_SITES = ("block.in", "block.out", *(f"{label}.{end}" for label in _BRANCHES for end in ("out", "sum")))
COLLAPSED_ENTRY = 0.1
"""Relative residual of the first block's input below which the embedding is to blame."""


@dataclass(frozen=True)
class Entry:
    """One thing that happened to the stream.

    Attributes:
        layer: of the block.
        component: label of the branch that was added, or ``"norm"``.
        before: relative residual of the stream before.
        branch: of what was added; NaN for a norm.
        after: of the stream after.
    """

    layer: int
    component: str
    before: float
    branch: float
    after: float

    @property
    def fall(self) -> float:
        """By how many powers of e the residual fell."""
        return math.log(self.before / self.after) if self.before > 0.0 and self.after > 0.0 else 0.0

    @property
    def is_branch_alone(self) -> bool:
        """Whether the sum is as collapsed as the branch although the stream was not: the skip carries nothing."""
        if not (self.branch > 0.0 and self.after > 0.0 and self.before > 0.0):
            return False
        return abs(math.log(self.after / self.branch)) < abs(math.log(self.after / self.before))


def read_ledger(view: ModelView, batch: Batch, policy: TokensPolicy) -> dict[str | None, tuple[Entry, ...]]:
    """Run the probe once more and write down every add and norm, per stack."""
    writer = RowWriter()
    reader = SiteReader([METRICS["relative_residual"]], policy, writer)
    reader.start(batch)
    with trace(view, SiteSelection.parse(_SITES), reader):
        batch.run(view.model)
    found = {(row.stack, row.layer, row.site): row.mean for row in layer_values(writer.table())}
    return {
        stack.name: tuple(
            entry
            for layer, plan in enumerate(stack.plans)
            for entry in _entries(layer, plan.skips, _of_layer(found, stack.name, layer))
        )
        for stack in view.stacks
    }


def _of_layer(found: Mapping[tuple[str | None, int, str], float], stack: str | None, layer: int) -> dict[str, float]:
    return {site: value for (name, number, site), value in found.items() if (name, number) == (stack, layer)}


def _entries(layer: int, labels: Sequence[str], residual: Mapping[str, float]) -> list[Entry]:
    entries = []
    before = residual.get("block.in", math.nan)
    for label in labels:
        after = residual.get(f"{label}.sum", math.nan)
        entries.append(Entry(layer, label, before, residual.get(f"{label}.out", math.nan), after))
        before = after
    entries.append(Entry(layer, "norm", before, math.nan, residual.get("block.out", math.nan)))
    return entries


def likely_component(entries: Sequence[Entry], layer: int) -> str:
    """The component under which the residual fell most, from the first block to this one.

    **Heuristic.** Where most adds of that branch leave the stream as collapsed as the branch itself, it is the
    ``"skip"`` that carries too little. ``"embedding"`` when the tokens were already equal on entry,
    ``"unknown"`` when nothing fell.
    """
    seen = [entry for entry in entries if entry.layer <= layer]
    if seen and seen[0].before < COLLAPSED_ENTRY:
        return "embedding"
    falls: dict[str, float] = {}
    for entry in seen:
        falls[entry.component] = falls.get(entry.component, 0.0) + entry.fall
    worst = max(falls, key=lambda name: falls[name], default="unknown")
    if worst == "unknown" or not falls[worst] > 0.0:
        return "unknown"
    blamed = [entry for entry in seen if entry.component == worst and entry.fall > 0.0]
    alone = sum(entry.is_branch_alone for entry in blamed)
    return "skip" if worst != "norm" and 2 * alone > len(blamed) else worst
