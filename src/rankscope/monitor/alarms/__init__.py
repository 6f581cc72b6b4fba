"""Alarms: one file each, found by name in ``ALARMS``."""

from rankscope.monitor.alarms._spec import (
    ALARMS,
    JUMP,
    AlarmSpec,
    Judgement,
    LayerState,
    LevelChange,
    alarm,
    largest_change,
)

__all__ = ["ALARMS", "JUMP", "AlarmSpec", "Judgement", "LayerState", "LevelChange", "alarm", "largest_change"]
