"""Real runs of ``transformers.Trainer``, watched."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import rankscope as rs
from rankscope.errors import InputError, UnknownNameError
from rankscope.monitor import read_record
from rankscope.monitor.hosts.hugging_face import GaugeCallback
from tests.monitor.hosts.sabotage import make_tokens_equal
from tests.monitor.sinks.readings import curve, events, texts, wandb_records
from tests.monitor.trainings import assert_bit_equal, batches, bert, probe

RESIDUAL = "rankscope/relative_residual/least"


def trainer_of(folder: Path, *, steps: int = 4, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 2,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    data = [{name: value[0] for name, value in batch.items()} for batch in batches(24, sequences=1)]
    return kind(bert(), TrainingArguments(str(folder / "out"), **(arguments | options)), train_dataset=data)


class Sabotage(TrainerCallback):
    """The model collapses at step 3, between two readings."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        if state.global_step == 3:
            make_tokens_equal(facts["model"])


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
def test_every_reporter_gets_readings_and_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow, wandb = pytest.importorskip("mlflow"), pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    store = f"sqlite:///{tmp_path}/mlflow.db"
    for name, value in {"MLFLOW_TRACKING_URI": store, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    trainer = trainer_of(tmp_path, steps=9, report_to=["tensorboard", "wandb", "mlflow"])
    trainer.add_callback(Sabotage())
    gauge = GaugeCallback(probe(), schedule=1, record=tmp_path / "gauge", actions=("stop",), strict=True)
    gauge.attach(trainer)
    trainer.train()

    record = read_record(tmp_path / "gauge")
    read = {reading.step: reading.scalars[RESIDUAL] for reading in record.readings}
    (alarm,) = [alarm for alarm in record.alarms if alarm.name == "token_collapse"]
    assert trainer.state.global_step == alarm.step == 5, "two readings confirm it, and it stops the run"
    assert list(read) == [1, 2, 3, 4, 5]
    assert read[3] > 0.5 > 0.1 > read[4]
    assert "qk_to_v_gradient" in {row.metric for row in record.readings[0].table}

    found = events(tmp_path / "out")
    assert curve(found, f"train/{RESIDUAL}") == pytest.approx(read, rel=1e-6)
    assert list(curve(found, "train/loss")) == [2, 4], "a reading at the same step must not swallow the loss"
    assert alarm.sentence in texts(found, "rankscope/alarm/token_collapse")[0]
    assert len(list((tmp_path / "out").rglob("events.*"))) == 1, "alarms came before the reporter closed its file"

    (run,) = mlflow.MlflowClient(store).search_runs(["0"])
    history = mlflow.MlflowClient(store).get_metric_history(run.info.run_id, RESIDUAL)
    assert {metric.step: metric.value for metric in history} == read
    assert run.data.tags["rankscope.alarm.token_collapse"] == alarm.sentence
    mlflow.set_tracking_uri(None)

    wandb.finish()
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(tmp_path)
        if record.HasField("history")
    ]
    logged = {row["train/global_step"]: row[f"train/{RESIDUAL}"] for row in rows if f"train/{RESIDUAL}" in row}
    assert logged == read
    assert any(row.get("rankscope/alarm/token_collapse") == alarm.sentence for row in rows)


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    bare = trainer_of(tmp_path)
    bare.train()
    watched = trainer_of(tmp_path)  # only now: a Trainer seeds the generators when it is built
    GaugeCallback(probe(), schedule=1, strict=True).attach(watched)
    watched.train()
    assert_bit_equal(weights(bare), weights(watched))
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (bare, watched)]
    assert losses[0] == losses[1]
    assert [entry["step"] for entry in watched.state.log_history if RESIDUAL in entry] == [1, 2, 3, 4]


def test_a_second_run_gets_a_gauge_of_its_own(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, steps=2)
    callback = GaugeCallback(probe(), schedule=1, strict=True).attach(trainer)
    trainer.train()
    first = callback.gauge
    trainer.train()
    assert first is not callback.gauge
    assert callback.gauge is not None
    assert callback.gauge.last is not None
    callback.attach(trainer)
    assert trainer.callback_handler.callbacks.count(callback) == 1


def test_without_a_trainer_the_record_is_kept_and_the_user_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(tmp_path, steps=2)
    trainer.add_callback(GaugeCallback(probe(), schedule=1, record=tmp_path / "gauge", strict=True))
    with caplog.at_level(logging.WARNING, logger="rankscope.monitor"):
        trainer.train()
    assert [reading.step for reading in read_record(tmp_path / "gauge").readings] == [1, 2]
    assert not any(RESIDUAL in entry for entry in trainer.state.log_history)
    assert sum(".attach(trainer)" in record.getMessage() for record in caplog.records) == 1


class Refuses(Trainer):  # type: ignore[misc]
    """Cannot log what it does not know."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if RESIDUAL in logs:
            raise KeyError(RESIDUAL)
        super().log(logs, start_time)


def test_a_host_that_cannot_log_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(tmp_path, kind=Refuses)
    GaugeCallback(probe(), schedule=1, record=tmp_path / "gauge").attach(trainer)
    with caplog.at_level(logging.ERROR, logger="rankscope.monitor"):
        trainer.train()
    assert trainer.state.global_step == 4
    assert len(read_record(tmp_path / "gauge").readings) == 4
    assert sum("could not log" in record.getMessage() for record in caplog.records) == 1


def test_strict_raises_what_the_host_raised(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, kind=Refuses)
    GaugeCallback(probe(), schedule=1, strict=True).attach(trainer)
    with pytest.raises(KeyError, match="relative_residual"):
        trainer.train()


def test_a_part_of_the_model_can_be_watched(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, steps=1)
    callback = GaugeCallback(probe(), model="bert", schedule=1, strict=True).attach(trainer)
    trainer.train()
    assert callback.gauge is not None
    assert callback.gauge.last is not None
    assert callback.gauge.last.values("relative_residual").keys() == {0, 1}


def test_arguments_that_mean_nothing_are_refused_where_they_are_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="schedule"):
        GaugeCallback(probe(), schedule="sometimes")
    with pytest.raises(UnknownNameError, match="relative_residual"):
        GaugeCallback(probe(), metrics=["relative_residul"])
    with pytest.raises(UnknownNameError, match="token_collapse"):
        GaugeCallback(probe(), alarms=["token_colapse"])
    with pytest.raises(UnknownNameError, match="stop"):
        GaugeCallback(probe(), actions=["stopp"])  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"transformers\.Trainer"):
        GaugeCallback(probe()).attach(object())  # type: ignore[arg-type]
    trainer = trainer_of(tmp_path, steps=1)
    GaugeCallback(probe(), model="brt").attach(trainer)
    with pytest.raises(UnknownNameError, match="'bert'"):
        trainer.train()


def test_one_line_watches_a_trainer_with_its_loss_and_prints_eight_keys(tmp_path: Path) -> None:
    bare = trainer_of(tmp_path)
    bare.train()
    trainer = trainer_of(tmp_path)
    watch = rs.watch(trainer, schedule=1, strict=True)
    trainer.train()
    assert_bit_equal(weights(bare), weights(trainer))
    assert list(watch.history.index) == [1, 2, 3, 4]
    logged = [entry for entry in trainer.state.log_history if RESIDUAL in entry]
    assert max(sum(name.startswith("rankscope/") for name in entry) for entry in logged) <= 8
    means = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    own = list(watch.history["loss"])
    assert [(own[0] + own[1]) / 2, (own[2] + own[3]) / 2] == pytest.approx(means, rel=1e-3)
    assert "learning_rate" in watch.history
    assert watch.gauge is not None
    assert watch.gauge.last is not None
    assert "answers_alike" in {row.metric for row in watch.gauge.last.table}
    assert not trainer.model._forward_pre_hooks
