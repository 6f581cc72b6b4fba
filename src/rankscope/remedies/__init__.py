"""Remedies for rank collapse: one file each, found by name in ``REMEDIES``."""

from rankscope._citations import Cite
from rankscope.remedies._applying import Treatment, applied, treatment
from rankscope.remedies._evidence import Arrangement, Evidence, arrangement_of, evidence_for
from rankscope.remedies._spec import REMEDIES, Remedy, RemedyCase, Step, remedy

__all__ = [
    "REMEDIES",
    "Arrangement",
    "Cite",
    "Evidence",
    "Remedy",
    "RemedyCase",
    "Step",
    "Treatment",
    "applied",
    "arrangement_of",
    "evidence_for",
    "remedy",
    "treatment",
]
