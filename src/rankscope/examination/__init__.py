"""Causes of failures: one declaration each, found by name in ``CAUSES``, proven by experiments on the model."""

from rankscope.examination._engine import Diagnosis, examine, find
from rankscope.examination._examination import AttentionSeen, Examination, ModuleCall
from rankscope.examination._spec import CAUSES, CauseSpec, Finding, cause

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
