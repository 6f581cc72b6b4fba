"""Alarms: one file each, found by name in ``ALARMS``."""

from rankscope.monitor.alarms._spec import ALARMS, AlarmSpec, Change, Judgement, LayerState

__all__ = ["ALARMS", "AlarmSpec", "Change", "Judgement", "LayerState"]
