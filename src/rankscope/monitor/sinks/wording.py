"""How an alarm reads in a tracker. No torch in this file."""

from __future__ import annotations

from rankscope.runs.readings import Alarm, scalar_name

ALARM_NAME = "rankscope/alarm"
MARKS = {"raised": "\N{WARNING SIGN} raised", "cleared": "\N{CHECK MARK} cleared"}


def title(alarm: Alarm) -> str:
    """A few words for a list of notifications.

    Example:
        >>> title(Alarm("token_collapse", "raised", 90, None, 7, "...", {}, "attention", ()))
        'rankscope: token collapse raised at layer 7'
    """
    where = f"layer {alarm.layer}" if alarm.stack is None else f"layer {alarm.layer} of the {alarm.stack}"
    return f"rankscope: {alarm.name.replace('_', ' ')} {alarm.state} at {where}"


def as_markdown(alarm: Alarm) -> str:
    """State, sentence, and a table of the evidence."""
    rows = "\n".join(f"| {name.replace('_', ' ')} | {value:.4g} |" for name, value in alarm.evidence.items())
    table = f"\n\n| evidence | value |\n|---|---|\n{rows}" if rows else ""
    return f"**{MARKS[alarm.state]}** {alarm.sentence}{table}"


def artifact_name(metric: str, stack: str | None) -> str:
    """Name of a picture among the files of a run, ``rankscope/METRIC/layers.png``."""
    return f"{scalar_name(metric, stack, 'layers')}.png"
