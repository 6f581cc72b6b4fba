"""Alarms: functions of one reading, found by name in ``ALARMS``."""

from rankscope.monitor.alarms._spec import ALARMS, AlarmSpec, Breach, LayerState, alarm

__all__ = ["ALARMS", "AlarmSpec", "Breach", "LayerState", "alarm"]
