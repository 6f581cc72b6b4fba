"""All cases; importing a module of networks puts them in."""

from tests.hostile import skips
from tests.hostile.case import CASES

MODULES = (skips,)

__all__ = ["CASES"]
