"""Metrics: one file each, found by name in ``METRICS``."""

from rankscope._citations import Cite
from rankscope.linalg.attention_view import AttentionView
from rankscope.linalg.tokens import Tokens
from rankscope.linalg.update import Update
from rankscope.metrics._evaluate import (
    DEFAULT_ATTENTION_METRICS,
    DEFAULT_TOKEN_METRICS,
    NORM_METRICS,
    PAIR_METRICS,
    MetricValues,
    evaluate,
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
    metric,
    metric_alias,
    token_metric,
    update_metric,
)

__all__ = [
    "CHANNEL_ORDER",
    "DEFAULT_ATTENTION_METRICS",
    "DEFAULT_TOKEN_METRICS",
    "METRICS",
    "NORM_METRICS",
    "PAIR_METRICS",
    "ROTATION",
    "SCALE",
    "SHIFT",
    "SIDES",
    "TOKEN_ORDER",
    "AttentionView",
    "Cite",
    "Invariance",
    "MetricSpec",
    "MetricValues",
    "Side",
    "Tokens",
    "Update",
    "View",
    "attention_metric",
    "evaluate",
    "metric",
    "metric_alias",
    "token_metric",
    "update_metric",
]
