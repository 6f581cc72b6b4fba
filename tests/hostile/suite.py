"""All cases; importing a module of networks puts them in."""

from tests.hostile import across, attentions, layouts, masks, norms, pairs, recent, sharing, skips, windows
from tests.hostile.case import CASES

MODULES = (skips, across, layouts, norms, sharing, attentions, masks, pairs, windows, recent)

__all__ = ["CASES"]
