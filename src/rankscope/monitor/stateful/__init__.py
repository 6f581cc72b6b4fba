"""Every registered metric as a ``torchmetrics.Metric``: ``RelativeResidual`` for ``relative_residual``, and so on.

    from rankscope.monitor.stateful import RelativeResidual

    metric = RelativeResidual()
    metric.update(hidden_states, attention_mask)    # batch after batch, on every rank
    metric.compute()                                # mean over all sequences of all ranks

Every metric of tokens also has a class that compares inputs, ``RelativeResidualBetweenInputs`` and so on: it pools each
sequence to one vector, and measures all of them together.

The classes are created from the registry on demand; :mod:`~rankscope.monitor.stateful.functional` has
the stateless versions. They need torchmetrics: ``pip install 'rankscope[torchmetrics]'``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.monitor.stateful.metric import MeanOverSequences, MetricBetweenInputs

BETWEEN_INPUTS = "BetweenInputs"


def __getattr__(name: str) -> type[MeanOverSequences] | type[MetricBetweenInputs]:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rankscope.metrics import METRICS

    known = class_names(METRICS)
    spec = METRICS[known[one]] if (one := name.removesuffix(BETWEEN_INPUTS)) in known else None
    if spec is None or (one != name and spec.side != "tokens"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(known))}")
    from rankscope.monitor.stateful.metric import make_class, make_class_between_inputs

    make = make_class if one == name else make_class_between_inputs
    made = make(name, spec, __name__)
    globals()[name] = made
    return made


def __dir__() -> list[str]:
    from rankscope.metrics import METRICS

    of_tokens = [name for name, spec in METRICS.items() if spec.side == "tokens"]
    return sorted([*class_names(METRICS), *(f"{name}{BETWEEN_INPUTS}" for name in class_names(of_tokens))])


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
