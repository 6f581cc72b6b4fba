"""Remedies for rank collapse: one file each, found by name in ``REMEDIES``."""

from rankscope.remedies._applying import Treatment, applied, remedied, treatment
from rankscope.remedies._spec import REMEDIES, Remedy, RemedyCase, remedy

__all__ = ["REMEDIES", "Remedy", "RemedyCase", "Treatment", "applied", "remedied", "remedy", "treatment"]
