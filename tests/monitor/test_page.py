"""The examples of the pages about watching a run, and about its hosts, run as printed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.monitor import read_record
from tests.monitor.sinks.readings import events
from tests.printed import check

PAGES = Path(__file__).parents[2] / "docs/howto"
RESIDUAL = "rankscope/relative_residual/least"


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    state = pytest.importorskip("accelerate").state
    state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches .4. is smaller than the logging interval")
def test_every_block_runs_and_every_host_leaves_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("lightning", "tensorboard", "torchmetrics", "matplotlib"):
        pytest.importorskip(package)
    for page in ("monitor.md", "trainers.md"):
        check(PAGES / page, tmp_path, monkeypatch)
    for host in ("plain", "trainer", "lightning", "accelerate"):
        (reading, *_) = read_record(Path("runs") / host).readings
        assert {row.layer for row in reading.table} == {0, 1, None}
        assert "qk_to_v_gradient" in {row.metric for row in reading.table}
    for folder in ("lightning_logs", "runs/accelerated", "runs/board"):
        assert any(RESIDUAL in tag for tag in events(Path(folder)).Tags()["scalars"]), os.listdir(folder)
