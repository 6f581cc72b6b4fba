"""A local trackio project, read back by trackio."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rankscope.errors import InputError, MissingExtraError
from rankscope.monitor.sinks.trackio import TrackioSink
from tests.monitor.sinks.readings import SENTENCE, feed


def test_a_project_holds_scalars_and_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    with pytest.raises(InputError, match=r"trackio\.init"):
        TrackioSink()
    for module in [name for name in sys.modules if name.startswith("trackio.")]:
        for name, place in (("TRACKIO_DIR", tmp_path), ("MEDIA_DIR", tmp_path / "media")):
            if name in vars(sys.modules[module]):
                monkeypatch.setattr(f"{module}.{name}", place)
    trackio.init(project="p", name="r", embed=False, auto_log_cpu=False, auto_log_gpu=False)
    feed(TrackioSink())
    trackio.finish()
    logs = SQLiteStorage.get_logs("p", "r")
    assert [(row["step"], row["rankscope/alarms"]) for row in logs if "rankscope/alarms" in row] == [
        (10, 0.0),
        (20, 1.0),
    ]
    (run,) = trackio.Api().runs("p")
    alerts = {alert["title"]: (alert["step"], alert["text"]) for alert in run.alerts()}
    assert alerts["rankscope: token collapse raised at block 1"] == (20, SENTENCE)


def test_without_trackio_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rankscope\[trackio\]'"):
        TrackioSink()
