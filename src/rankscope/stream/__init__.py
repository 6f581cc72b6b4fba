"""The residual stream of a running model: where its blocks and skips are, and a tracer that shows it at every site."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._lazy import names_of

if TYPE_CHECKING:
    from rankscope.stream.sites import SiteRef, SiteSelection
    from rankscope.stream.tracer import trace
    from rankscope.stream.viewing import undisturbed, view_of

__all__ = [
    "SiteRef",
    "SiteSelection",
    "trace",
    "undisturbed",
    "view_of",
]

__getattr__ = names_of(__name__)
