"""Heads: the weights of single attention heads, read through small family descriptions."""

from rankscope.models.heads._weights import HeadWeights, head_weights
from rankscope.models.heads.family import FAMILIES, REFUSED

__all__ = ["FAMILIES", "REFUSED", "HeadWeights", "head_weights"]
