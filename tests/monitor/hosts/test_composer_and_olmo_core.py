"""The callbacks for Composer and OLMo-core in loops that call them as the two trainers do.

The real trainers need other versions of torch than the rest of the tests.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rankscope import Surgery
from rankscope.errors import UnknownNameError
from rankscope.monitor import read_record
from rankscope.surgery.operating import operate
from tests.monitor.trainings import batches, bert, probe

RESIDUAL = "rankscope/relative_residual/least"
READINGS = {"schedule": 2, "strict": True}


class Callback:
    """What both libraries call their base class: every event does nothing."""

    trainer: Any = None

    @property
    def step(self) -> int:
        return int(self.trainer.global_step)


def callback_of(monkeypatch: pytest.MonkeyPatch, host: str, *modules: str) -> Any:
    """The callback of a host, on look-alikes of the modules that it imports."""
    for name in modules:
        found = ModuleType(name)
        found.Callback, found.State, found.Logger = Callback, object, object  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, found)
    monkeypatch.delitem(sys.modules, f"rankscope.monitor.hosts.{host}", raising=False)
    return importlib.import_module(f"rankscope.monitor.hosts.{host}").GaugeCallback


class Net(nn.Module):
    """Takes a batch, as a ``ComposerModel`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = bert()

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        return self.net(**batch).loss


def composer(gauge: Any, model: Net, steps: int) -> dict[int, dict[str, float]]:
    """The order of events in ``composer.Trainer.fit``; what was logged, by step."""
    logged: dict[int, dict[str, float]] = {}
    logger = SimpleNamespace(log_metrics=lambda values, step: logged.setdefault(step, values))
    state = SimpleNamespace(model=model, timestamp=SimpleNamespace(batch=SimpleNamespace(value=0)), stopped=False)
    state.stop_training = lambda: setattr(state, "stopped", True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state.optimizers = (optimizer,)
    gauge.fit_start(state, logger)
    for state.batch in batches(steps):
        optimizer.zero_grad()
        state.loss = model(state.batch)
        state.loss.backward()
        gauge.after_train_batch(state, logger)
        optimizer.step()
        state.timestamp.batch.value += 1
        gauge.batch_end(state, logger)
        if state.stopped:
            break
    gauge.close(state, logger)
    return logged


def olmo_core(gauge: Any, model: Net, steps: int) -> dict[int, dict[str, float]]:
    """The order of events in ``olmo_core.train.Trainer.fit``; what was recorded, by step."""
    logged: dict[int, dict[str, float]] = {}
    trainer = SimpleNamespace(train_module=SimpleNamespace(model=model), global_step=0, canceled="")

    def record_metric(name: str, value: float, reduce_type: Any = None, namespace: str | None = None) -> None:
        logged.setdefault(trainer.global_step, {}).update({f"{namespace}/{name}" if namespace else name: value})

    trainer.record_metric = record_metric
    trainer.cancel_run = lambda reason, no_sync: setattr(trainer, "canceled", reason)
    gauge.trainer = trainer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gauge.pre_train()
    for batch in batches(steps):
        trainer.global_step += 1
        gauge.pre_step(batch)
        loss = model(batch)
        loss.backward()
        trainer.record_metric("CE loss", loss.detach(), "mean", namespace="train")
        gauge.pre_optim_step()
        optimizer.step()
        optimizer.zero_grad()
        gauge.post_train_batch()
        if trainer.canceled:
            break
    gauge.close()
    assert trainer.record_metric is record_metric
    return logged


HOSTS = pytest.mark.parametrize(
    ("host", "loop", "modules"),
    [
        ("composer", composer, ("composer", "composer.core", "composer.loggers")),
        ("olmo_core", olmo_core, ("olmo_core", "olmo_core.train", "olmo_core.train.callbacks")),
    ],
)


@HOSTS
def test_readings_gradients_and_batches_reach_record_and_host(
    host: str, loop: Any, modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = callback_of(monkeypatch, host, *modules)
    gauge = make(
        probe(), model="net", record=tmp_path, alarms=["vanishing_qk_gradients", "repeated_sequences"], **READINGS
    )
    logged = loop(gauge, Net(), 4)
    record = read_record(tmp_path)
    assert (
        [reading.step for reading in record.readings]
        == [step for step, entry in logged.items() if RESIDUAL in entry]
        == [1, 2, 4]
    )
    assert [entry[RESIDUAL] for entry in logged.values() if RESIDUAL in entry] == [
        r.scalars[RESIDUAL] for r in record.readings
    ]
    assert all(reading.values("qk_to_v_gradient") for reading in record.readings)
    assert (tmp_path / "readings-00000.parquet").exists(), "closed"
    assert all(reading.scalars["rankscope/loss"] > 0.0 for reading in record.readings)
    if host == "olmo_core":
        assert [entry["train/CE loss"] for entry in logged.values() if RESIDUAL in entry] == [
            reading.scalars["rankscope/loss"] for reading in record.readings
        ]


@HOSTS
def test_without_a_name_the_part_that_takes_tensors_is_read(
    host: str, loop: Any, modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    gauge, model = callback_of(monkeypatch, host, *modules)(schedule=1, strict=True), Net()
    loop(gauge, model, 3)
    assert gauge.gauge is not None
    assert gauge.gauge._prober.model is model.net
    assert len(gauge.history) == 3
    assert gauge.history["loss"].notna().all()


@HOSTS
def test_alarm_stops_the_host_and_a_wrong_name_is_refused(
    host: str, loop: Any, modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, model = callback_of(monkeypatch, host, *modules), Net()
    with operate(model.net, Surgery(skip=0.0, mlp="drop")):
        logged = loop(make(probe(), model="net", schedule=1, actions=("stop",), strict=True), model, 6)
    assert 2 <= sum(RESIDUAL in entry for entry in logged.values()) <= len(logged) < 6
    with pytest.raises(UnknownNameError, match="net"):
        loop(make(probe(), model="nett", **READINGS), model, 1)
