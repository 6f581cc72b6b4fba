"""Real loops on accelerate, watched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from rankscope.monitor import Gauge, Sink, read_record
from rankscope.monitor.hosts.accelerate import AcceleratorSink
from tests.monitor.hosts.sabotage import make_tokens_equal
from tests.monitor.sinks.readings import curve, events, texts
from tests.monitor.trainings import batches, bert, probe

accelerate = pytest.importorskip("accelerate")
RESIDUAL = "rankscope/relative_residual/least"


class Kept(accelerate.tracking.GeneralTracker):  # type: ignore[misc]
    """A tracker of one's own."""

    name = "kept"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def tracker(self) -> list[Any]:
        return self.rows

    def log(self, values: dict[str, float], step: int | None = None, **options: Any) -> None:
        self.rows.append((step, values))


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_trackers_get_readings_and_alarms(tmp_path: Path) -> None:
    kept = Kept()
    accelerator = accelerate.Accelerator(cpu=True, log_with=["tensorboard", kept], project_dir=str(tmp_path))
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(batches(9), batch_size=None))
    sink = AcceleratorSink(accelerator)
    assert isinstance(sink, Sink)
    gauge = Gauge(model, probe(), schedule=1, sinks=[sink], record=tmp_path / "gauge", actions=("stop",), strict=True)
    accelerator.init_trackers("run")  # later than the sink
    for step, batch in enumerate(loader):
        if step == 3:
            make_tokens_equal(model)
        accelerator.backward(model(**batch).loss)
        gauge.after_backward(step)
        optimizer.step()
        optimizer.zero_grad()
        gauge.step(step)
        if gauge.should_stop:
            break
    gauge.close()
    accelerator.end_training()

    record = read_record(tmp_path / "gauge")
    read = {reading.step: reading.scalars[RESIDUAL] for reading in record.readings}
    (alarm,) = [alarm for alarm in record.alarms if alarm.name == "token_collapse"]
    assert alarm.step == step == 4
    assert {at: values[RESIDUAL] for at, values in kept.rows} == read
    found = events(tmp_path / "run")
    assert curve(found, RESIDUAL) == pytest.approx(read, rel=1e-6)
    assert alarm.sentence in texts(found, "rankscope/alarm/token_collapse")[0]


def test_without_trackers_nothing_is_written() -> None:
    sink = AcceleratorSink(accelerate.Accelerator(cpu=True))
    sink.scalars(1, {RESIDUAL: 0.5})
    sink.close()
