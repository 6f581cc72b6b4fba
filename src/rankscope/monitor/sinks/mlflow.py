"""MLflow: metrics, alarms as tags and one text file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rankscope.errors import InputError, MissingExtraError
from rankscope.monitor.readings import Alarm

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["MlflowSink"]

ALARM_FILE = "rankscope/alarms.txt"
TAG = "rankscope.alarm."
_LONGEST_TAG = 5000
_MOST_LINES = 200


class MlflowSink:
    """Writes to a run by its id, through its own client: the active run is not changed.

    Args:
        run_id: id of the run; None for the active one.
        client: None for a client of the current tracking store.

    Raises:
        MissingExtraError: mlflow is not installed.
        InputError: no id is given and no run is active.
    """

    def __init__(self, run_id: str | None = None, client: MlflowClient | None = None) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise MissingExtraError("MlflowSink", "mlflow", "mlflow") from error
        self._run_id = _active_run_id() if run_id is None else run_id
        self._client = mlflow.MlflowClient() if client is None else client
        self._metric = mlflow.entities.Metric
        self._lines: list[str] = []

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """All of them in one request."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def alarm(self, step: int, alarm: Alarm) -> None:
        """The last alarm of each name is a tag; the text file has all of them."""
        self._client.set_tag(self._run_id, TAG + alarm.name, alarm.sentence[:_LONGEST_TAG])
        self._lines = [*self._lines, alarm.sentence][-_MOST_LINES:]
        self._client.log_text(self._run_id, "\n".join(self._lines) + "\n", ALARM_FILE)

    def close(self) -> None:
        """Does nothing: you end the run."""


def _active_run_id() -> str:
    import mlflow

    active = mlflow.active_run()
    if active is None:
        raise InputError("There is no active MLflow run to write to. Call mlflow.start_run() first, or pass run_id.")
    found: str = active.info.run_id
    return found
