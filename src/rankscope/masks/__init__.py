"""Attention masks: one file each, found by name in ``MASKS``, and combined in expressions with ``parse_mask``."""

from rankscope.masks._edges import Progressions, clipped
from rankscope.masks._expression import parse_mask
from rankscope.masks._mask import Mask
from rankscope.masks._spec import MASKS, MaskSpec, Parameter, mask

__all__ = [
    "MASKS",
    "Mask",
    "MaskSpec",
    "Parameter",
    "Progressions",
    "clipped",
    "mask",
    "parse_mask",
]
