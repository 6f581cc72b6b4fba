"""The states a model can be in, one table of thresholds, and the sentences for them. Does not import torch."""

from rankscope.verdicts.axes import AXES, AxisFinding, across_axes
from rankscope.verdicts.inputs import inputs_findings
from rankscope.verdicts.states import THRESHOLDS, State, is_collapsed
from rankscope.verdicts.verdict import Verdict, judge_rows

__all__ = [
    "AXES",
    "THRESHOLDS",
    "AxisFinding",
    "State",
    "Verdict",
    "across_axes",
    "inputs_findings",
    "is_collapsed",
    "judge_rows",
]
