"""Real runs of Lightning, watched."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from rankscope.errors import MissingExtraError
from rankscope.monitor import read_record
from tests.monitor.hosts.sabotage import make_tokens_equal
from tests.monitor.sinks.readings import curve, events, texts, wandb_records
from tests.monitor.trainings import assert_bit_equal, batches, bert, probe

lightning = pytest.importorskip("lightning")
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger  # noqa: E402

from rankscope.monitor.hosts.lightning import GaugeCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]
RESIDUAL = "rankscope/relative_residual/least"


class Module(lightning.LightningModule):  # type: ignore[misc]
    """A transformer in a module that has no forward of its own; it may collapse after step 3."""

    def __init__(self, *, collapses: bool = False) -> None:
        super().__init__()
        self.net = bert()
        self.collapses = collapses

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        if self.collapses and self.trainer.global_step == 3:
            make_tokens_equal(self.net)
        loss: torch.Tensor = self.net(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(module: Module, *callbacks: Any, loggers: Any = False, steps: int = 4) -> Any:
    data = [{name: value[0] for name, value in batch.items()} for batch in batches(48, sequences=1)]
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=loggers,
        callbacks=list(callbacks),
        accumulate_grad_batches=2,
        log_every_n_steps=5,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=2))
    return trainer


@pytest.mark.slow
def test_loggers_get_readings_and_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    loggers = [TensorBoardLogger(str(tmp_path / "tb")), WandbLogger(save_dir=str(tmp_path), offline=True)]
    callback = GaugeCallback(
        probe(), model="net", schedule=1, record=tmp_path / "gauge", actions=("stop",), strict=True
    )
    trainer = fit(Module(collapses=True), callback, loggers=loggers, steps=12)

    record = read_record(tmp_path / "gauge")
    read = {reading.step: reading.scalars[RESIDUAL] for reading in record.readings}
    (alarm,) = [alarm for alarm in record.alarms if alarm.name == "token_collapse"]
    assert trainer.global_step == alarm.step == 5, "two readings confirm it, and it stops the run"
    assert list(read) == [1, 2, 3, 4, 5], "once per optimizer step, whatever log_every_n_steps says"
    assert read[3] > 0.5 > 0.1 > read[4]
    assert "qk_to_v_gradient" in {row.metric for row in record.readings[0].table}
    assert trainer.callback_metrics[RESIDUAL].item() == pytest.approx(read[5], rel=1e-6)

    found = events(tmp_path / "tb")
    assert curve(found, RESIDUAL) == pytest.approx(read, rel=1e-6)
    assert alarm.sentence in texts(found, "rankscope/alarm/token_collapse")[0]

    loggers[1].experiment.finish()
    alerts = [entry.alert.text for entry in wandb_records(tmp_path) if entry.HasField("alert")]
    assert alarm.sentence in alerts


def test_training_is_the_same_with_and_without() -> None:
    finals = []
    for callbacks in ((), (GaugeCallback(probe(), model="net", schedule=1, strict=True),)):
        torch.manual_seed(4)
        module = Module()
        fit(module, *callbacks)
        finals.append({name: value.detach().clone() for name, value in module.state_dict().items()})
    assert_bit_equal(*finals)


class Fails(lightning.Callback):  # type: ignore[misc]
    """Something else ends the run."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            raise ZeroDivisionError


def test_a_run_that_dies_leaves_a_whole_record(tmp_path: Path) -> None:
    callback = GaugeCallback(probe(), model="net", schedule=1, record=tmp_path / "gauge", strict=True)
    with pytest.raises(ZeroDivisionError):
        fit(Module(), callback, Fails())
    assert [reading.step for reading in read_record(tmp_path / "gauge").readings] == [1, 2]
    assert list((tmp_path / "gauge").glob("*.parquet"))


def test_without_lightning_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "rankscope.monitor.hosts.lightning")
    with pytest.raises(MissingExtraError, match=r"pip install 'rankscope\[lightning\]'"):
        importlib.import_module("rankscope.monitor.hosts.lightning")


def test_no_argument_is_needed_and_the_loss_is_read() -> None:
    callback = GaugeCallback(schedule=1, strict=True)
    torch.manual_seed(4)
    bare = Module()
    fit(bare)
    torch.manual_seed(4)
    module = Module()
    fit(module, callback)
    assert_bit_equal(dict(bare.state_dict()), dict(module.state_dict()))
    assert list(callback.history.index) == [1, 2, 3, 4]
    assert callback.history["loss"].gt(0.0).all()
    assert callback.gauge is not None
    assert type(callback.gauge._prober.model).__name__ == "BertForMaskedLM"
    assert callback.gauge.last is not None
    assert "answers_alike" in {row.metric for row in callback.gauge.last.table}
