"""TensorBoard: scalars, heatmaps as images, alarms as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.errors import MissingExtraError
from rankscope.monitor.readings import Alarm, Heatmap
from rankscope.monitor.sinks.pictures import ALARM_NAME, Painter, as_markdown

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
        self._paint = Painter()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar per name, flushed: readings are rare and should be visible at once."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def heatmap(self, step: int, heatmap: Heatmap) -> None:
        """The whole run so far as one image."""
        picture = self._paint(heatmap)
        if picture is not None:
            self._writer.add_image(heatmap.name, picture, step, dataformats="HWC")
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
