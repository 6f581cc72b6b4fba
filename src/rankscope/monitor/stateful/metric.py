"""Stateful metrics: sums that accumulate over batches and ranks, independent of the batch size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankscope.errors import InputError, MissingExtraError
from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.precision import as_float64
from rankscope.metrics import METRICS, SIDES, MetricSpec
from rankscope.verbs.between_inputs import Pooling

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

    def _add(self, values: Tensor) -> None:
        is_undefined = torch.isnan(values)
        self.total = self.total + values.masked_fill(is_undefined, 0.0).sum().to(self.total.device)
        self.count = self.count + (~is_undefined).sum().to(self.count.device)
        self.undefined = self.undefined + is_undefined.sum().to(self.undefined.device)


class ViewMetric(MeanOverSequences):
    """A metric of any side but those below."""

    def update(self, *tensors: Tensor, attention_mask: Tensor | None = None) -> None:
        """Add the tensors of the metric's side, each ``(*batch, tokens, ...)``; see ``SIDES``."""
        spec = METRICS[self.name]
        self._add(spec.function(SIDES[spec.side].view(*tensors, _as_bool(attention_mask))))


class TokenMetric(ViewMetric):
    """A metric of hidden states."""

    def update(self, x: Tensor, attention_mask: Tensor | None = None) -> None:  # type: ignore[override]
        """Add hidden states ``(*batch, tokens, dim)``; tokens whose mask is zero do not count."""
        super().update(x, attention_mask=attention_mask)


class AttentionMetric(MeanOverSequences):
    """A metric of attention probabilities."""

    def update(self, probs: Tensor, attention_mask: Tensor | None = None, support: Tensor | None = None) -> None:
        """Add probabilities ``(*batch, heads, query, key)``.

        Args:
            probs: probabilities returned by the softmax.
            attention_mask: ``(*batch, tokens)``; a token whose mask is zero is neither a query nor a key.
            support: booleans that broadcast to ``probs``, True where a query may see a key: pass the causal mask here.
        """
        keep = _as_bool(attention_mask)
        if keep is not None:
            keys = keep[..., None, None, :]
            support = keys if support is None else support & keys
        self._add(METRICS[self.name].function(AttentionMatrix(probs, support, keep)))


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
        keep = _as_bool(attention_mask)
        if x.ndim == 2 and keep is None:
            self.pooled.append(as_float64(x.detach()))
            return
        if x.ndim != 3 or (keep is not None and keep.shape != x.shape[:2]):
            raise InputError(
                f"Inputs were given as a tensor of shape {tuple(x.shape)}. Expected pooled vectors (inputs, dim), or "
                "hidden states (inputs, tokens, dim) with a mask (inputs, tokens)."
            )
        present = slice(None) if keep is None else keep.any(1)
        self.pooled.append(Pooling("mean").pooled(x[present], None if keep is None else keep[present]))

    def compute(self) -> Tensor:
        """The metric of all inputs so far; NaN if there are none."""
        vectors = self.pooled if isinstance(self.pooled, list) else [self.pooled]  # one tensor after a sync
        if not vectors:
            return torch.tensor(torch.nan, dtype=torch.float64)
        return METRICS[self.name].function(torch.cat(vectors))


_BASES: Mapping[str, type[MeanOverSequences]] = {"tokens": TokenMetric, "attention": AttentionMetric}


def make_class(name: str, spec: MetricSpec, module: str, *, between_inputs: bool) -> type[Metric]:
    """The class of a metric, as an attribute of ``module``."""
    base: type[Metric] = MetricBetweenInputs if between_inputs else _BASES.get(spec.side, ViewMetric)
    over = "over inputs" if between_inputs else "as a mean over sequences"
    doc = f"``{spec.name}`` {over}.\n\n{spec.summary}\n\n{base.__doc__}"
    facts: dict[str, Any] = {"name": spec.name, "__doc__": doc, "__module__": module, "__qualname__": name}
    return type(name, (base,), facts)


def _as_bool(mask: Tensor | None) -> Tensor | None:
    """A mask as booleans: masks of tokenizers are integers."""
    return None if mask is None else mask != 0
