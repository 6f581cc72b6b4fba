"""Every registered metric as a ``torchmetrics.Metric``: ``RelativeResidual`` for ``relative_residual``, and so on.

    from rankscope.monitor.stateful import RelativeResidual

    metric = RelativeResidual()
    metric.update(hidden_states, attention_mask)    # batch after batch, on every rank
    metric.compute()                                # mean over all sequences of all ranks

Every metric of tokens also has a class that compares inputs, ``RelativeResidualBetweenInputs`` and so on: it pools each
sequence to one vector, and measures all of them together.

The classes are created from the registry on demand. They need torchmetrics: ``pip install 'rankscope[torchmetrics]'``.
"""

from __future__ import annotations

from typing import Any

BETWEEN_INPUTS = "BetweenInputs"


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rankscope.metrics import METRICS

    known = {class_name(metric): spec for metric, spec in METRICS.items()}
    spec = known.get(one := name.removesuffix(BETWEEN_INPUTS))
    if spec is None or (one != name and spec.side != "tokens"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(known))}")
    from rankscope.monitor.stateful.metric import make_class

    globals()[name] = made = make_class(name, spec, __name__, between_inputs=one != name)
    return made


def __dir__() -> list[str]:
    from rankscope.metrics import METRICS

    of_tokens = (name for name, spec in METRICS.items() if spec.side == "tokens")
    return sorted([*map(class_name, METRICS), *(f"{class_name(name)}{BETWEEN_INPUTS}" for name in of_tokens)])


def class_name(metric: str) -> str:
    """The class of a metric.

    Example:
        >>> class_name("relative_residual")
        'RelativeResidual'
    """
    return "".join(word.capitalize() for word in metric.split("_"))
