"""All cases; importing a module of networks puts them in."""

from tests.hostile import across, attentions, layouts, norms, sharing, skips
from tests.hostile.case import CASES

MODULES = (skips, across, layouts, norms, sharing, attentions)

__all__ = ["CASES"]
