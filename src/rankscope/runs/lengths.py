"""Which metrics depend on the number of tokens, as metrics declare when they are registered."""

from __future__ import annotations

from collections.abc import Iterable

from rankscope._registry import Registry

LENGTH_DEPENDENCE: Registry[bool] = Registry("length dependence")


def depending_on_length(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that are metrics whose size depends on the number of tokens.

    Example:
        >>> depending_on_length(["effective_rank", "relative_residual", "not a metric"])
        ['effective_rank']
    """
    known = [name for name in names if name in LENGTH_DEPENDENCE]
    return [name for name in known if LENGTH_DEPENDENCE[name]]
