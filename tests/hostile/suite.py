"""All cases; importing a module of networks puts them in."""

from tests.hostile import across, layouts, skips
from tests.hostile.case import CASES

MODULES = (skips, across, layouts)

__all__ = ["CASES"]
