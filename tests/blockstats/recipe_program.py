"""The recipes that need several processes: ``recipe_program.py FOLDER SCENARIO...``."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from examples.block_statistics import plain_ddp, torchtitan_shape
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.blockstats.nets import DEPTH, WIDTH, batches, decoder, loss_of
from tests.blockstats.rank_program import tensor_parallel
from tests.forked import Scenario, run_scenarios


def ddp(rank: int, world: int, folder: Path) -> dict[str, Any]:
    own = [ids.chunk(world)[rank] for ids in batches(1) * 9]
    plain_ddp.train(decoder(), WIDTH, own, folder / "rows.jsonl")
    rows = (folder / "rows.jsonl").read_text().splitlines() if rank == 0 else []
    return {"rows": [json.loads(row) for row in rows]}


class Part(nn.Module):
    """A pipeline stage as torchtitan makes them: its layers keep their numbers in the whole model."""

    def __init__(self, whole: nn.Module, numbers: range) -> None:
        super().__init__()
        self.embedding = whole.embedding if 0 in numbers else None
        self.layers = nn.ModuleDict({str(number): whole.layers[number] for number in numbers})  # type: ignore[index]
        self.norm, self.head = (whole.norm, whole.head) if DEPTH - 1 in numbers else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)  # type: ignore[operator]
        for layer in self.layers.values():
            x = layer(x)
        return x if self.norm is None else self.head(self.norm(x))  # type: ignore[misc, operator]


class MetricsProcessor:
    """The two methods of torchtitan's that the recipe calls."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def should_log(self, step: int) -> bool:
        return step == 1 or step % 2 == 0

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        self.logged.append({"step": step, **(extra_metrics or {})})


def torchtitan(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """FSDP2 x TP x PP, 2 x 2 x 2; the rate is zero, so that every step reads the same model."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    stage = mesh["pp"].get_local_rank()
    model = decoder()
    tensor_parallel(model, mesh["tp"], sequence=False)
    for block in model.layers:
        fully_shard(block, mesh=mesh["dp"])
    part = Part(model, range(2 * stage, 2 * stage + 2))
    schedule = Schedule1F1B(
        PipelineStage(part, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group()), 2, loss_fn=loss_of
    )
    processor = MetricsProcessor()
    own = [ids.chunk(2)[mesh["dp"].get_local_rank()] for ids in batches(1) * 4]
    torchtitan_shape.train(
        [part],
        WIDTH,
        DEPTH,
        schedule,
        torch.optim.SGD(part.parameters(), lr=0.0),
        processor,
        own,
        is_first=stage == 0,
        is_last=stage == 1,
    )
    return {"rows": processor.logged}


SCENARIOS: dict[str, tuple[int, Scenario]] = {"ddp": (2, ddp), "torchtitan": (8, torchtitan)}


if __name__ == "__main__":
    for name in ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining"):
        importlib.import_module(name)
    run_scenarios(SCENARIOS, sys.argv[1:])
