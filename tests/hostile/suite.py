"""All cases; importing a module of networks puts them in."""

from tests.hostile import across, skips
from tests.hostile.case import CASES

MODULES = (skips, across)

__all__ = ["CASES"]
