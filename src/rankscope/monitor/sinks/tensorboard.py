"""TensorBoard: scalars, alarms as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.errors import MissingExtraError
from rankscope.monitor.readings import Alarm
from rankscope.monitor.sinks.words import ALARM_NAME, as_markdown

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardSink"]


class TensorBoardSink:
    """Writes event files.

    Args:
        to: a folder for new event files, which are closed with the gauge; or your own ``SummaryWriter``,
            which is left open.

    Raises:
        MissingExtraError: a folder is given and tensorboard is not installed.
    """

    def __init__(self, to: str | Path | SummaryWriter) -> None:
        self._owned = isinstance(to, (str, Path))
        self._writer = _new_writer(to) if isinstance(to, (str, Path)) else to

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar per name, flushed: readings are rare and should be visible at once."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def alarm(self, step: int, alarm: Alarm) -> None:
        """The sentence and its evidence, as text."""
        self._writer.add_text(f"{ALARM_NAME}/{alarm.name}", as_markdown(alarm), step)
        self._writer.flush()

    def close(self) -> None:
        """Close the files opened here."""
        if self._owned:
            self._writer.close()


def _new_writer(folder: str | Path) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("TensorBoardSink", "tensorboard", "tensorboard") from error
    return SummaryWriter(str(folder))
