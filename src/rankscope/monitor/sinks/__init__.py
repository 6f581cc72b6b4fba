"""Sinks for trackers, each imported only when it is used."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from rankscope.monitor.outlets import Sink

_SINKS = {"tensorboard": "TensorBoardSink", "wandb": "WandbSink", "mlflow": "MlflowSink", "trackio": "TrackioSink"}


def sinks_of(tracker: str, *target: Any) -> Iterator[Sink]:
    """The sink for what a tracker of this name writes to; none for a tracker that is not known here."""
    if tracker in _SINKS:
        yield getattr(import_module(f"{__name__}.{tracker}"), _SINKS[tracker])(*target)
