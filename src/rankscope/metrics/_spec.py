"""The declaration of a metric, and the decorators that register one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Flag, auto
from functools import partial, wraps
from typing import Literal

import torch
from torch import Tensor

from rankscope._citations import Cite
from rankscope._printing import brief
from rankscope._registry import Registry
from rankscope.metrics._sides import ATTENTION, BRANCH, QUERIES, ROUTER, SCORES, TOKENS, UPDATE, Side, V, View
from rankscope.runs.lengths import LENGTH_DEPENDENCE

Needs = Literal["norms", "order", "gram", "spectrum"]
MetricFunction = Callable[..., Tensor]


class Invariance(Flag):
    """Transformations of X (or of P, for attention) that do not change a metric.

    For an update, a branch, or queries and keys, both tensors are transformed in the same way; for a router, channels
    are the experts.
    """

    NONE = 0
    TOKEN_ORDER = auto()
    """Permutation of the tokens."""
    CHANNEL_ORDER = auto()
    """Permutation of the channels."""
    ROTATION = auto()
    """Multiplication of every token by the same orthogonal matrix."""
    SCALE = auto()
    """Multiplication by a positive number."""
    SHIFT = auto()
    """Addition of one vector to every token."""


NONE = Invariance.NONE
TOKEN_ORDER = Invariance.TOKEN_ORDER
CHANNEL_ORDER = Invariance.CHANNEL_ORDER
ROTATION = Invariance.ROTATION
SCALE = Invariance.SCALE
SHIFT = Invariance.SHIFT


@dataclass(frozen=True)
class MetricSpec:
    """A metric: one pure function, and the facts that runs, tests, documentation and the command line use.

    Attributes:
        name: the function's name.
        side: name of what it measures, a key of ``SIDES``.
        symbol: LaTeX.
        range: smallest and largest value, possibly infinite.
        at_collapse: value when all tokens are equal (all rows of P, for attention); None if there is no such value.
        invariant_to: transformations that do not change it.
        needs: its cost: sums (norms), sorting (order), a Gram matrix, or all singular values (spectrum).
        reads_deviation: it depends on X - 1x^T alone, and sees only rounding once tokens agree to the float floor.
        least_count: smallest number of tokens for which it has a value.
        depends_on_length: whether its size depends on the number of tokens (a rank, a sum, a count), so that values at
            different lengths are not comparable.
        cites: its sources.
        summary: first line of its docstring.
        function: takes the tensors of its side, or a view of them that shares reductions; returns float64, one value
            per sequence (and head).
        alias_of: the metric of which this is another name, or None.
        estimate: whether a metric that needs all singular values is taken from a sample of the tokens for large shapes.
    """

    name: str
    side: str
    symbol: str
    range: tuple[float, float]
    at_collapse: float | None
    invariant_to: Invariance
    needs: Needs
    reads_deviation: bool
    least_count: int
    cites: tuple[Cite, ...]
    summary: str
    function: MetricFunction
    alias_of: str | None = None
    depends_on_length: bool = False
    estimate: bool = False

    __repr__ = brief

    @property
    def floors_itself(self) -> bool:
        """Whether it is a share made of products of tokens, which is only rounding at or below the float floor."""
        is_bounded = self.range[0] == 0 and math.isfinite(self.range[1]) and not self.at_collapse
        return is_bounded and self.side == TOKENS.name and self.needs in ("gram", "spectrum")


METRICS: Registry[MetricSpec] = Registry("metric", __package__)


def _add(spec: MetricSpec) -> None:
    METRICS.add(spec.name, spec)
    LENGTH_DEPENDENCE.add(spec.name, spec.depends_on_length)


def metric(
    side: Side[V],
    *,
    symbol: str,
    range: tuple[float, float],
    at_collapse: float | None,
    invariant_to: Invariance,
    needs: Needs,
    reads_deviation: bool = False,
    least_count: int = 1,
    depends_on_length: bool = False,
    estimate: bool = False,
    cites: tuple[Cite, ...],
) -> Callable[[Callable[[V], Tensor]], Callable[..., Tensor]]:
    """Register a function of a side's view; the result also accepts the tensors of which the side makes a view."""

    def register(compute: Callable[[V], Tensor]) -> Callable[..., Tensor]:
        @wraps(compute)
        def measured(*given: V | Tensor) -> Tensor:
            view = given[0] if isinstance(given[0], side.kind) else side.view(*given)
            return where_defined(compute(view), view, least_count).reshape(view.batch_shape)

        facts = (symbol, range, at_collapse, invariant_to, needs, reads_deviation, least_count, cites)
        _add(
            MetricSpec(
                compute.__name__, side.name, *facts, _summary(compute), measured, None, depends_on_length, estimate
            )
        )
        return measured

    return register


token_metric = partial(metric, TOKENS)
"""Register a function of :class:`Tokens`; the result also accepts a plain tensor ``(*batch, tokens, dim)``."""
attention_metric = partial(metric, ATTENTION)
"""Register a function of :class:`AttentionView`; the result also accepts ``(*batch, heads, query, key)``."""
score_metric = partial(metric, SCORES)
"""Register a function of :class:`AttentionScores`; the result also accepts ``(*batch, heads, query, key)``."""
query_metric = partial(metric, QUERIES)
"""Register a function of :class:`Queries`; the result also accepts the queries and the keys."""
router_metric = partial(metric, ROUTER)
"""Register a function of :class:`Routing`; the result also accepts probabilities and expert numbers."""
update_metric = partial(metric, UPDATE)
"""Register a function of :class:`Update`; the result also accepts the stream and what is added to it."""
branch_metric = partial(metric, BRANCH)
"""Register a function of :class:`Branch`; the result also accepts what a branch reads and what it adds."""


def metric_alias(
    of: MetricFunction, *, symbol: str, cites: tuple[Cite, ...]
) -> Callable[[MetricFunction], MetricFunction]:
    """Register a function that only calls the metric ``of`` as another name for it, with its own symbol and source."""

    def register(named: MetricFunction) -> MetricFunction:
        facts = METRICS.registered(of.__name__)
        name, summary = named.__name__, _summary(named)
        _add(
            replace(facts, name=name, symbol=symbol, cites=cites, summary=summary, function=named, alias_of=of.__name__)
        )
        return named

    return register


def where_defined(value: Tensor, view: View, least_count: int) -> Tensor:
    """NaN for matrices with fewer tokens."""
    if view.fewest >= least_count:
        return value
    return torch.where(view.count >= least_count, value, math.nan)


def _summary(compute: Callable[..., Tensor]) -> str:
    return (compute.__doc__ or "").strip().split("\n", 1)[0]
