"""Trainings by two hosts in several real processes. Run as a program: ``ranks_program.py FOLDER``."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from rankscope.monitor import Gauge
from tests.forked import Scenario, free_port, run_scenarios
from tests.monitor.hosts import test_hugging_face as hugging_face
from tests.monitor.hosts import test_lightning as lightning_tests
from tests.monitor.trainings import batches, bert, probe


def as_torchrun_does(rank: int, world: int, port: int) -> None:
    """The environment in which hosts look for their processes."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests")


def weights(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def trainer(*, watched: bool = True, collapses: bool = False, schedule: Any = 1, steps: int = 6) -> Scenario:
    """A ``Trainer`` under DDP, with TensorBoard."""

    def run(rank: int, world: int, folder: Path) -> dict[str, Any]:
        from rankscope.monitor.hosts.hugging_face import GaugeCallback

        as_torchrun_does(rank, world, PORT)
        host = hugging_face.trainer_of(folder, steps=steps, report_to=["tensorboard"], gradient_accumulation_steps=1)
        if collapses:
            host.add_callback(hugging_face.Sabotage())
        gauge = GaugeCallback(
            probe(), schedule=schedule, record=folder / "record", actions=("log", "stop"), strict=True
        )
        if watched:
            gauge.attach(host)
        host.train()
        return {
            "world": host.args.world_size,
            "wrapped": type(host.model_wrapped).__name__,
            "step": host.state.global_step,
            "logged": [line["step"] for line in host.state.log_history if hugging_face.RESIDUAL in line],
            "losses": [line["step"] for line in host.state.log_history if "loss" in line],
            "weights": weights(host.model),
        }

    return run


def lightning(*, watched: bool = True, collapses: bool = False, schedule: Any = 1, steps: int = 6) -> Scenario:
    """A Lightning ``Trainer`` with the strategy ``ddp``, with TensorBoard."""

    def run(rank: int, world: int, folder: Path) -> dict[str, Any]:
        import lightning as L
        from lightning.pytorch.loggers import TensorBoardLogger
        from lightning.pytorch.strategies import DDPStrategy

        from rankscope.monitor.hosts.lightning import GaugeCallback

        as_torchrun_does(rank, world, PORT)
        gauge = GaugeCallback(
            probe(), model="net", schedule=schedule, record=folder / "record", actions=("log", "stop"), strict=True
        )
        module = lightning_tests.Module(collapses=collapses)
        data = [{name: value[0] for name, value in batch.items()} for batch in batches(48, sequences=1)]
        host = L.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=world,
            strategy=DDPStrategy(process_group_backend="gloo", find_unused_parameters=True),
            logger=TensorBoardLogger(str(folder / "tb")),
            callbacks=[gauge] if watched else [],
            log_every_n_steps=5,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        torch.manual_seed(5)
        host.fit(module, DataLoader(data, batch_size=2))
        return {
            "world": host.world_size,
            "wrapped": type(host.strategy).__name__,
            "step": host.global_step,
            "callback_metrics": hugging_face.RESIDUAL in host.callback_metrics,
            "weights": weights(module),
        }

    return run


PORT = free_port()
SCENARIOS: dict[str, tuple[int, Scenario]] = {
    "trainer": (2, trainer()),
    "trainer-bare": (2, trainer(watched=False)),
    "trainer-collapse": (2, trainer(collapses=True, steps=12)),
    "trainer-clock": (2, trainer(schedule="20%", steps=12)),
    "lightning": (2, lightning()),
    "lightning-bare": (2, lightning(watched=False)),
    "lightning-collapse": (2, lightning(collapses=True, steps=12)),
    "lightning-clock": (2, lightning(schedule="20%", steps=12)),
}


def import_everything() -> None:
    for name in ("torch._dynamo", "tensorboard", "torch.utils.tensorboard", "accelerate", "matplotlib.figure"):
        importlib.import_module(name)
    Gauge(bert(), probe(), strict=True).step(0)


if __name__ == "__main__":
    assert not dist.is_initialized()
    import_everything()
    run_scenarios(SCENARIOS, sys.argv[1:])
