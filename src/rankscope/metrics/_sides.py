"""The sides of metrics: what a metric is measured of, and the view of it that the metric's function receives.

A side is one entry of :data:`SIDES` and one view class in :mod:`rankscope.linalg`. The sites that show it are named in
:mod:`rankscope.stream.sites`. Readers, stateful metrics, tables of the documentation and contract tests follow from
these two declarations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.attention_scores import AttentionScores
from rankscope.linalg.attention_view import AttentionView
from rankscope.linalg.branch import Branch
from rankscope.linalg.queries import Queries
from rankscope.linalg.routing import Routing
from rankscope.linalg.tokens import Tokens
from rankscope.linalg.update import Update


class View(Protocol):
    """What every view has: float64 reductions of some tensors, one matrix per sequence (and head).

    A view whose metrics read deviations also has ``relative_deviation`` and ``is_resolved``.
    """

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The axes over which metrics give separate values."""

    @property
    def count(self) -> Tensor:
        """Number of tokens (or query rows) that count, per matrix."""

    @property
    def fewest(self) -> int:
        """Lower bound on that number."""

    @property
    def finite(self) -> Tensor:
        """Whether every entry that counts is a finite number, per matrix."""


V = TypeVar("V", bound=View)


@dataclass(frozen=True)
class Side(Generic[V]):
    """What a group of metrics is measured of.

    Attributes:
        name: as in ``rankscope ls metrics``.
        kind: class of the views that its metrics receive.
        view: makes a view from the tensors that a site shows; the last argument, ``keep``, is optional.
        tensors: name and shape of each of these tensors.
        has_heads: whether values are per head.
    """

    name: str
    kind: type[V]
    view: Callable[..., V]
    tensors: tuple[str, ...]
    has_heads: bool = False


TOKENS = Side("tokens", Tokens, Tokens, ("x (*batch, tokens, dim)",))
ATTENTION: Side[AttentionView] = Side(
    "attention",
    AttentionView,  # type: ignore[type-abstract]
    AttentionMatrix,
    ("probs (*batch, heads, query, key)",),
    has_heads=True,
)
UPDATE = Side("update", Update, Update, ("before (*batch, tokens, dim)", "change (*batch, tokens, dim)"))
SCORES = Side("scores", AttentionScores, AttentionScores, ("scores (*batch, heads, query, key)",), has_heads=True)
QUERIES = Side(
    "queries",
    Queries,
    Queries,
    ("query (*batch, heads, query, dim)", "key (*batch, heads, key, dim)"),
    has_heads=True,
)
ROUTER = Side("router", Routing, Routing, ("probs (*batch, tokens, experts)", "chosen (*batch, tokens, k)"))
BRANCH = Side("branch", Branch, Branch, ("read (*batch, tokens, dim)", "added (*batch, tokens, dim)"))

SIDES: dict[str, Side[Any]] = {side.name: side for side in (TOKENS, ATTENTION, SCORES, QUERIES, UPDATE, ROUTER, BRANCH)}
"""Every side by name."""


def side_of_view(view: View) -> Side[Any]:
    """The side a view belongs to."""
    return next(side for side in SIDES.values() if isinstance(view, side.kind))
