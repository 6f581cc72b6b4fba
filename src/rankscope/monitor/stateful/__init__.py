"""Every registered metric as a ``torchmetrics.Metric``: ``RelativeResidual`` for ``relative_residual``, and so on.

    from rankscope.monitor.stateful import RelativeResidual

    metric = RelativeResidual()
    metric.update(hidden_states, attention_mask)    # batch after batch, on every rank
    metric.compute()                                # mean over all sequences of all ranks

The classes are created from the registry on demand; :mod:`~rankscope.monitor.stateful.functional` has
the stateless versions. They need torchmetrics: ``pip install 'rankscope[torchmetrics]'``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.monitor.stateful.metric import MeanOverSequences


def __getattr__(name: str) -> type[MeanOverSequences]:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rankscope.metrics import METRICS

    known = class_names(METRICS)
    if name not in known:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(known))}")
    from rankscope.monitor.stateful.metric import make_class

    made = make_class(name, METRICS[known[name]], __name__)
    globals()[name] = made
    return made


def __dir__() -> list[str]:
    from rankscope.metrics import METRICS

    return sorted(class_names(METRICS))


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
