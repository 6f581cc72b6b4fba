"""How an alarm reads in a tracker: a title, and a text with its evidence."""

from __future__ import annotations

from rankscope.monitor.readings import Alarm
from rankscope.views import Table
from rankscope.views.text import markdown_text

ALARM_NAME = "rankscope/alarm"
MARKS = {"raised": "\N{WARNING SIGN} raised", "cleared": "\N{CHECK MARK} cleared"}


def title(alarm: Alarm) -> str:
    """A short title for a list of notifications.

    Example:
        >>> title(Alarm("token_collapse", "raised", 90, None, 7, "...", {}, "attention"))
        'rankscope: token collapse raised at block 7'
    """
    where = "" if alarm.layer is None else f" at block {alarm.layer}"
    of = "" if alarm.stack is None else f" of the {alarm.stack}"
    return f"rankscope: {alarm.name.replace('_', ' ')} {alarm.state}{where}{of}"


def as_markdown(alarm: Alarm) -> str:
    """State, sentence, and a table of the evidence."""
    rows = [[name.replace("_", " "), f"{value:.4g}"] for name, value in alarm.evidence.items()]
    table = f"\n\n{markdown_text(Table(['evidence', 'value'], rows))}" if rows else ""
    return f"**{MARKS[alarm.state]}** {alarm.sentence}{table}"
