"""Trainings in several real processes, each under a gauge. Run as a program: ``ranks_program.py FOLDER``.

Imports are done once, then every scenario forks its ranks; each rank writes what it saw to a JSON file in
``FOLDER/SCENARIO``.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rankscope.monitor import Gauge, Reading
from tests.flat_calls import flat
from tests.forked import run_scenarios
from tests.monitor.trainings import batches, bert, probe

STEPS = 4


def shard(batch: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, torch.Tensor]:
    return {name: value.chunk(world)[rank] for name, value in batch.items()}


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp2(model: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def alone(model: nn.Module) -> nn.Module:
    return model


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {"ddp": ddp, "fsdp2": fsdp2, "alone": alone}


def training(
    wrap: str,
    rank: int,
    world: int,
    *,
    watched: bool = True,
    after_step: Callable[[int], None] = lambda step: None,
    steps: int = STEPS,
    record: Path | None = None,
    schedule: Any = 1,
    absent: tuple[int, int] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, and say what the gauge said. ``absent=(rank, step)``: that rank calls no gauge from that step on."""
    torch.manual_seed(0)
    model = WRAPPERS[wrap](bert(dropout=0.0).double())
    gauge = flat(Gauge, model, probe(), schedule=schedule, record=record, **options) if watched else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    readings: list[Reading] = []
    for step, batch in enumerate(batches(steps)):
        here = None if absent is not None and rank == absent[0] and step >= absent[1] else gauge
        model(**shard(batch, rank, world)).loss.backward()
        if here is not None:
            here.after_backward(step)
        optimizer.step()
        optimizer.zero_grad()
        reading = here.step(step) if here is not None else None
        readings += [] if reading is None else [reading]
        after_step(step)
    if gauge is not None:
        gauge.close()
    return {
        "readings": [reading.to_json() for reading in readings],
        "disabled": None if gauge is None else gauge.disabled,
        "weights": _weights(model),
        "parameters": sorted({type(p).__name__ for p in model.parameters()}),
    }


def _weights(model: nn.Module) -> str:
    """A hash of all bits."""
    from torch.distributed.tensor import DTensor

    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in found)).hexdigest()


def no_batch(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The last rank runs out of data after two steps; DDP shadows its collectives, nobody shadows the gauge's."""
    model = nn.parallel.DistributedDataParallel(bert(dropout=0.0).double())
    gauge = Gauge(model, probe(), schedule=1, record=folder / "record", strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = batches(STEPS)[: 2 if rank == world - 1 else STEPS]
    seen = []
    with model.join():
        for step, batch in enumerate(mine):
            model(**shard(batch, rank, world)).loss.backward()
            gauge.after_backward(step)
            optimizer.step()
            optimizer.zero_grad()
            seen += [] if gauge.step(step) is None else [step]
    gauge.close()
    return {"steps": seen}


def killed(victim: int) -> Callable[[int, int, Path], dict[str, Any]]:
    def run(rank: int, world: int, folder: Path) -> dict[str, Any]:
        def die(step: int) -> None:
            if rank == victim and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        return training("ddp", rank, world, after_step=die, record=folder / "record")

    return run


class Moody:
    """Like a schedule that goes by the clock: each rank wants something else."""

    by_clock = True

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.wanted = {0, 5, 9}

    def wants(self, step: int, now: float) -> bool:
        return self.rank > 0 or step in self.wanted

    def was_read(self, step: int, seconds: float) -> None:
        pass

    def notice(self, step: int, name: str, value: float) -> None:
        pass


def by_clock(wrap: str) -> Callable[[int, int, Path], dict[str, Any]]:
    def run(rank: int, world: int, folder: Path) -> dict[str, Any]:
        return training(wrap, rank, world, steps=12, schedule=Moody(rank), strict=True)

    return run


def one_that_fails(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The gauge of one rank breaks down between two readings; the others must not wait for it for ever."""
    model = fsdp2(bert(dropout=0.0).double())
    gauge = Gauge(model, probe(), schedule=1, patience=60.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(batches(STEPS)):
        model(**shard(batch, rank, world)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1 and step == 1:
            gauge._prober._ready = None
            gauge._switch_off("a test wanted it")
        gauge.step(step)
    return {"disabled": gauge.disabled, "last": None if gauge.last is None else gauge.last.step}


def trained(wrap: str, **options: Any) -> Callable[[int, int, Path], dict[str, Any]]:
    return lambda rank, world, folder: training(
        wrap, rank, world, record=folder / "record" if options.get("watched", True) else None, **options
    )


SCENARIOS: dict[str, tuple[int, Callable[[int, int, Path], dict[str, Any]]]] = {
    "alone": (1, trained("alone", strict=True)),
    "ddp2": (2, trained("ddp", strict=True)),
    "ddp4": (4, trained("ddp", strict=True)),
    "ddp2-bare": (2, trained("ddp", watched=False)),
    "fsdp2": (2, trained("fsdp2", strict=True)),
    "fsdp4": (4, trained("fsdp2", strict=True)),
    "fsdp2-bare": (2, trained("fsdp2", watched=False)),
    "no-batch": (2, no_batch),
    "fsdp-absent": (2, trained("fsdp2", absent=(1, 2), patience=0.5)),
    "fsdp-failing": (2, one_that_fails),
    "clock-ddp": (2, by_clock("ddp")),
    "clock-fsdp": (2, by_clock("fsdp2")),
    "kill-first": (2, killed(0)),
    "kill-second": (2, killed(1)),
}


def import_everything() -> None:
    """What the ranks would each import for themselves; a forward pass, but no backward one, which starts threads."""
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"):
        importlib.import_module(name)
    Gauge(bert(), probe(), strict=True).step(0)


if __name__ == "__main__":
    import_everything()
    run_scenarios(SCENARIOS, sys.argv[1:])
