"""A local store, read back by MLflow."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope.errors import InputError, MissingExtraError
from rankscope.monitor.sinks.mlflow import ALARM_FILE, MlflowSink
from tests.monitor.sinks.readings import OVER, SENTENCE, feed

mlflow = pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("store")
    found = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    found.create_experiment("gauge", artifact_location=(folder / "files").as_uri())
    return found


@pytest.fixture
def run_id(client: Any) -> str:
    experiment = client.get_experiment_by_name("gauge")
    return str(client.create_run(experiment.experiment_id).info.run_id)


def test_the_store_holds_metrics_and_alarms(client: Any, run_id: str, tmp_path: Path) -> None:
    feed(MlflowSink(run_id, client))
    history = client.get_metric_history(run_id, "rankscope/alarms")
    assert [(metric.step, metric.value) for metric in history] == [(10, 0.0), (20, 1.0)]
    kept = client.get_metric_history(run_id, "rankscope/relative_residual/least")
    assert [metric.value for metric in kept] == [0.25, 0.25]
    tags = client.get_run(run_id).data.tags
    assert tags["rankscope.alarm.token_collapse"] == OVER.sentence
    lines = Path(client.download_artifacts(run_id, ALARM_FILE, str(tmp_path))).read_text().splitlines()
    assert lines == [SENTENCE, OVER.sentence]


def test_the_active_run_is_the_default(client: Any, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"mlflow\.start_run"):
        MlflowSink()
    monkeypatch.setattr(mlflow, "active_run", lambda: client.get_run(run_id))
    MlflowSink(client=client).scalars(3, {"rankscope/alarms": 4.0})
    assert client.get_run(run_id).data.metrics == {"rankscope/alarms": 4.0}


def test_without_mlflow_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rankscope\[mlflow\]'"):
        MlflowSink()
