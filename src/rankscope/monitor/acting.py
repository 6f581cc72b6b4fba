"""What happens when an alarm is raised: log, warn, stop, raise, or call your own function."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Literal

from rankscope.errors import InputError, RankscopeError, UnknownNameError
from rankscope.monitor.readings import Alarm

Action = Literal["log", "warn", "stop", "raise"] | Callable[[Alarm], None]
NAMED_ACTIONS = ("log", "warn", "stop", "raise")
LOGGER = logging.getLogger("rankscope.monitor")


class CollapseWarning(UserWarning):
    """An alarm was raised."""


class CollapseError(RankscopeError):
    """An alarm was raised, and the run was configured to end on one (``actions=("raise",)``).

    Attributes:
        alarm: the alarm.
    """

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(alarm.sentence)
        self.alarm = alarm


class Actions:
    """Runs the requested actions, in order; those with output run on the first rank only.

    Args:
        actions: names or functions of an :class:`Alarm`.
        speaks: whether this rank logs, warns and calls functions.
        strict: raise the errors of functions, instead of reporting each once and leaving the function out.
    """

    def __init__(self, actions: Sequence[Action], *, speaks: bool, strict: bool = False) -> None:
        if isinstance(actions, str):
            raise InputError(f"actions={actions!r}: expected several in a tuple, such as ({actions!r},).")
        for action in actions:
            if isinstance(action, str) and action not in NAMED_ACTIONS:
                raise UnknownNameError("action", action, NAMED_ACTIONS)
            if not isinstance(action, str) and not callable(action):
                raise InputError(f"The action {action!r} is neither a name nor a function of an alarm.")
        self._actions = tuple(actions)
        self._speaks, self._strict = speaks, strict
        self.should_stop = False

    def take(self, alarm: Alarm, *, alone: bool = False) -> None:
        """Act on an alarm; a cleared alarm is only logged and passed to functions.

        An alarm of one process ``alone`` does not end the run: the others would wait for it for ever.
        """
        raised = alarm.state == "raised"
        for action in self._actions:
            if action == "stop":
                self.should_stop = self.should_stop or (raised and not alone)
            elif action == "log" and self._speaks:
                LOGGER.log(logging.WARNING if raised else logging.INFO, "%s", alarm.sentence)
            elif action == "warn" and self._speaks and raised:
                warnings.warn(alarm.sentence, CollapseWarning, stacklevel=3)
            elif not isinstance(action, str) and self._speaks:
                self._call(action, alarm)
        if raised and not alone and "raise" in self._actions:
            raise CollapseError(alarm)

    def _call(self, action: Callable[[Alarm], None], alarm: Alarm) -> None:
        try:
            action(alarm)
        except CollapseError:
            raise
        except Exception:
            if self._strict:
                raise
            self._actions = tuple(one for one in self._actions if one is not action)
            LOGGER.exception("The action %r failed and is not called again; the gauge continues.", action)
