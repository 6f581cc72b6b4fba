"""The states a model can be in, one table of thresholds, and the sentences for them. Does not import torch."""

from rankscope.verdicts.states import THRESHOLDS, State, is_collapsed
from rankscope.verdicts.verdict import Verdict, judge

__all__ = ["THRESHOLDS", "State", "Verdict", "is_collapsed", "judge"]
