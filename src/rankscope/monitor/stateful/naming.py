"""Names of metric classes. No torch in this file."""

from __future__ import annotations

from collections.abc import Iterable


def class_name(metric: str) -> str:
    """The class of a metric.

    Example:
        >>> class_name("relative_residual")
        'RelativeResidual'
    """
    return "".join(word.capitalize() for word in metric.split("_"))


def class_names(metrics: Iterable[str]) -> dict[str, str]:
    """Class names, each with the name of its metric."""
    return {class_name(metric): metric for metric in metrics}
