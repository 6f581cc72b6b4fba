"""Metrics: one file each, found by name in ``METRICS``."""

from rankscope.metrics._evaluate import (
    DEFAULT_ATTENTION_METRICS,
    DEFAULT_TOKEN_METRICS,
    NORM_METRICS,
    PAIR_METRICS,
    MetricValues,
    evaluate,
)
from rankscope.metrics._spec import METRICS, Invariance, MetricSpec

__all__ = [
    "DEFAULT_ATTENTION_METRICS",
    "DEFAULT_TOKEN_METRICS",
    "METRICS",
    "NORM_METRICS",
    "PAIR_METRICS",
    "Invariance",
    "MetricSpec",
    "MetricValues",
    "evaluate",
]
