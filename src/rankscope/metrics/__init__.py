"""Metrics: one file each, found by name in ``METRICS``."""

from rankscope._citations import Cite
from rankscope.linalg.attention_scores import AttentionScores
from rankscope.linalg.attention_view import AttentionView
from rankscope.linalg.branch import Branch
from rankscope.linalg.queries import Queries
from rankscope.linalg.routing import Routing
from rankscope.linalg.tokens import Tokens
from rankscope.linalg.update import Update
from rankscope.metrics._evaluate import (
    DEFAULT_ATTENTION_METRICS,
    DEFAULT_ROUTER_METRICS,
    DEFAULT_TOKEN_METRICS,
    DEFAULT_UPDATE_METRICS,
    NORM_METRICS,
    PAIR_METRICS,
    MetricValues,
    evaluate,
    is_left_out,
)
from rankscope.metrics._sides import SIDES, Side, View
from rankscope.metrics._spec import (
    CHANNEL_ORDER,
    METRICS,
    ROTATION,
    SCALE,
    SHIFT,
    TOKEN_ORDER,
    Invariance,
    MetricSpec,
    attention_metric,
    branch_metric,
    metric,
    metric_alias,
    query_metric,
    router_metric,
    score_metric,
    token_metric,
    update_metric,
)

__all__ = [
    "CHANNEL_ORDER",
    "DEFAULT_ATTENTION_METRICS",
    "DEFAULT_ROUTER_METRICS",
    "DEFAULT_TOKEN_METRICS",
    "DEFAULT_UPDATE_METRICS",
    "METRICS",
    "NORM_METRICS",
    "PAIR_METRICS",
    "ROTATION",
    "SCALE",
    "SHIFT",
    "SIDES",
    "TOKEN_ORDER",
    "AttentionScores",
    "AttentionView",
    "Branch",
    "Cite",
    "Invariance",
    "MetricSpec",
    "MetricValues",
    "Queries",
    "Routing",
    "Side",
    "Tokens",
    "Update",
    "View",
    "attention_metric",
    "branch_metric",
    "evaluate",
    "is_left_out",
    "metric",
    "metric_alias",
    "query_metric",
    "router_metric",
    "score_metric",
    "token_metric",
    "update_metric",
]
