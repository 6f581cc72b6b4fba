"""Remedies for rank collapse: one file each, found by name in ``REMEDIES``."""

from rankscope.remedies._applying import Treatment, applied, remedied, treatment
from rankscope.remedies._spec import REMEDIES, Case, Remedy

__all__ = ["REMEDIES", "Case", "Remedy", "Treatment", "applied", "remedied", "treatment"]
