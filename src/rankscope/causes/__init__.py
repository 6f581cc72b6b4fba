"""Causes of failures: one declaration each, found by name in ``CAUSES``, proven by experiments on the model."""

from rankscope.causes._engine import Diagnosis, examine, find
from rankscope.causes._examination import AttentionSeen, Examination, ModuleCall
from rankscope.causes._spec import CAUSES, CauseSpec, Finding, cause

__all__ = [
    "CAUSES",
    "AttentionSeen",
    "CauseSpec",
    "Diagnosis",
    "Examination",
    "Finding",
    "ModuleCall",
    "cause",
    "examine",
    "find",
]
