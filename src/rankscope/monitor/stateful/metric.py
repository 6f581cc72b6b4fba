"""Stateful metrics: sums that accumulate over batches and ranks, independent of the batch size."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from rankscope.errors import MissingExtraError
from rankscope.metrics import METRICS, MetricSpec
from rankscope.monitor.stateful.functional import Sums, attention_sums, pooled_inputs, token_sums

try:
    from torchmetrics import Metric
except ImportError as error:
    raise MissingExtraError("A stateful metric", "torchmetrics", "torchmetrics") from error


class MeanOverSequences(Metric):
    """Mean of one metric over all sequences (and heads) seen, on all ranks.

    **Exact**: the state is a float64 sum and two counts, each summed over ranks. Sequences for which the metric is
    undefined are counted in ``undefined`` and excluded; NaN if none is left. On a device without float64, keep the
    metric on the CPU: updates may come from any device.
    """

    is_differentiable = False
    full_state_update = False
    name: ClassVar[str]

    total: Tensor
    count: Tensor
    undefined: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("undefined", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        """The mean so far."""
        return self.total / self.count

    def _add(self, sums: Sums) -> None:
        self.total = self.total + sums.total.to(self.total.device)
        self.count = self.count + sums.count.to(self.count.device)
        self.undefined = self.undefined + sums.undefined.to(self.undefined.device)


class TokenMetric(MeanOverSequences):
    """A metric of hidden states."""

    def update(self, x: Tensor, attention_mask: Tensor | None = None) -> None:
        """Add hidden states ``(*batch, tokens, dim)``; tokens whose mask is zero do not count."""
        self._add(token_sums(METRICS[self.name], x, attention_mask))


class AttentionMetric(MeanOverSequences):
    """A metric of attention probabilities."""

    def update(self, probs: Tensor, attention_mask: Tensor | None = None, support: Tensor | None = None) -> None:
        """Add probabilities ``(*batch, heads, query, key)``; see ``functional.attention_sums`` for the masks."""
        self._add(attention_sums(METRICS[self.name], probs, attention_mask, support))


class MetricBetweenInputs(Metric):
    """One metric over all inputs seen, on all ranks, each pooled to one vector.

    **Exact** up to the rounding of another order: the state is the pooled vectors in float64, so it grows with their
    number; ``measure`` compares any number in constant memory. Inputs without a token that counts are left out.
    """

    is_differentiable = False
    full_state_update = False
    name: ClassVar[str]

    pooled: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("pooled", [], dist_reduce_fx="cat")

    def update(self, x: Tensor, attention_mask: Tensor | None = None) -> None:
        """Add pooled inputs ``(inputs, dim)``, or hidden states ``(inputs, tokens, dim)`` whose mean is taken."""
        self.pooled.append(pooled_inputs(x, attention_mask))

    def compute(self) -> Tensor:
        """The metric of all inputs so far; NaN if there are none."""
        vectors = self.pooled if isinstance(self.pooled, list) else [self.pooled]  # one tensor after a sync
        if not vectors:
            return torch.tensor(torch.nan, dtype=torch.float64)
        return METRICS[self.name].function(torch.cat(vectors))


def make_class_between_inputs(name: str, spec: MetricSpec, module: str) -> type[MetricBetweenInputs]:
    """The class of a token metric between inputs, as an attribute of ``module``."""
    doc = f"``{spec.name}`` over inputs.\n\n{spec.summary}\n\n{MetricBetweenInputs.__doc__}"
    facts: dict[str, Any] = {"name": spec.name, "__doc__": doc, "__module__": module, "__qualname__": name}
    return type(name, (MetricBetweenInputs,), facts)


def make_class(name: str, spec: MetricSpec, module: str) -> type[TokenMetric] | type[AttentionMetric]:
    """The class of a metric, as an attribute of ``module``."""
    base = TokenMetric if spec.side == "tokens" else AttentionMetric
    doc = f"Mean over sequences of ``{spec.name}``.\n\n{spec.summary}\n\n{MeanOverSequences.__doc__}"
    facts: dict[str, Any] = {"name": spec.name, "__doc__": doc, "__module__": module, "__qualname__": name}
    return type(name, (base,), facts)
