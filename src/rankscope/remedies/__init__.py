"""Remedies for rank collapse: one file each, found by name in ``REMEDIES``."""

from rankscope._citations import Cite
from rankscope.remedies._applying import Treatment, applied, remedied, treatment
from rankscope.remedies._spec import REMEDIES, Remedy, RemedyCase, Step, remedy

__all__ = [
    "REMEDIES",
    "Cite",
    "Remedy",
    "RemedyCase",
    "Step",
    "Treatment",
    "applied",
    "remedied",
    "remedy",
    "treatment",
]
