"""Alarms: one file each, found by name in ``ALARMS``."""

from rankscope.monitor.alarms._spec import ALARMS, AlarmSpec, Judgement, LayerState, alarm

__all__ = ["ALARMS", "AlarmSpec", "Judgement", "LayerState", "alarm"]
