"""The same training by one process and by several, with statistics and without. ``rank_program.py FOLDER SCENARIO...``.

A scenario is a cell ``parallelism, checkpoint, compiled``: how the model is spread, how activations are kept, and what
is compiled. Each rank writes what it read, and whether losses and parameters are those of a run without statistics.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from rankscope import blockstats
from rankscope.blockstats import BlockStats
from tests.blockstats.nets import CHECKPOINTS, COMPILED, TOKENS, WIDTH, Decoder, attached, batches, compiled, loss_of
from tests.forked import Scenario, run_scenarios

Step = Callable[[Tensor], list[float]]
PIPELINES = {  # layers of a stage, and how many stages a rank has
    "GPipe": ("ScheduleGPipe", 1),
    "1F1B": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zero bubble": ("ScheduleInterleavedZeroBubble", 2),
}
PER_STAGE = 2
WORLD = {
    **dict.fromkeys(("DDP", "accumulation", "FSDP2", "TP", "SP", *PIPELINES), 2),
    **dict.fromkeys(("FSDP2 x TP", "FSDP2 x SP"), 4),
}


def depth_of(kind: str) -> int:
    return PER_STAGE * WORLD[kind] * PIPELINES[kind][1] if kind in PIPELINES else 4


def window_of(kind: str) -> int:
    """Tokens per group: a sequence, or the part of one that a rank holds."""
    return TOKENS // 2 if kind.endswith("SP") else 0


def backend_of(kept: str, way: str) -> str:
    """``aot_eager`` compiles fastest, and cannot run operators that write inside a selective checkpoint."""
    return "inductor" if (kept, way) == ("selective", "blocks") else "aot_eager"


def built(kept: str, depth: int) -> Decoder:
    torch.manual_seed(0)
    return Decoder(CHECKPOINTS[kept], depth)


def tensor_parallel(model: Decoder, mesh: DeviceMesh, *, sequence: bool) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    columns, rows = ("query", "key", "value", "up"), ("out", "down")
    plan: dict[str, Any] = {name: tp.ColwiseParallel() for name in columns} | {
        name: tp.RowwiseParallel() for name in rows
    }
    if sequence:
        plan = {name: tp.ColwiseParallel(input_layouts=Shard(1)) for name in columns}
        plan |= {name: tp.RowwiseParallel(output_layouts=Shard(1)) for name in rows}
        plan |= {name: tp.SequenceParallel() for name in ("norm1", "norm2")}
        around = {
            "embedding": tp.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
            "norm": tp.SequenceParallel(),
            "head": tp.PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
            ),
        }
        tp.parallelize_module(model, mesh, around)
    for block in model.layers:
        tp.parallelize_module(block, mesh, plan)


def spread(kind: str, model: Decoder, way: str, backend: str, rank: int, world: int) -> tuple[Step, list[nn.Module]]:
    """One step of this kind, from the whole batch to the losses of this rank, and the modules it trains."""
    if kind in PIPELINES:
        return pipeline(kind, model, way, backend, rank, world)
    from torch.distributed.fsdp import fully_shard

    run: nn.Module = model
    data, part, parts = None, rank, world
    if kind in ("TP", "SP"):
        tensor_parallel(model, init_device_mesh("cpu", (world,)), sequence=kind == "SP")
        part, parts = 0, 1
    elif kind.startswith("FSDP2"):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
        data, part, parts = mesh["data"], rank // (world // 2), 2
        if "x" in kind:
            tensor_parallel(model, mesh["tensor"], sequence=kind.endswith("SP"))
    if way == "blocks":
        compiled(model, way, backend)
    if data is not None:
        for block in model.layers:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
    if way == "whole":  # the hooks of FSDP2 break the graph, with statistics or without
        run = torch.compile(model, backend="aot_eager", fullgraph=data is None)  # type: ignore[assignment]
    if kind in ("DDP", "accumulation"):
        run = DistributedDataParallel(run)
    microbatches = 4 if kind == "accumulation" else 2

    def step(ids: Tensor) -> list[float]:
        losses = []
        own = ids.chunk(parts)[part].chunk(microbatches)
        for number, microbatch in enumerate(own):
            waits = kind == "accumulation" and number < microbatches - 1
            with run.no_sync() if waits else nullcontext():  # type: ignore[operator]
                loss = loss_of(run(microbatch), microbatch)
                loss.backward()
            losses.append(loss.item())
        return losses

    return step, [model]


def numbers_of(kind: str, rank: int, world: int) -> list[int]:
    """The stages of a pipeline that this rank has."""
    return list(range(rank, world * PIPELINES[kind][1], world))


def pipeline(kind: str, model: Decoder, way: str, backend: str, rank: int, world: int) -> tuple[Step, list[nn.Module]]:
    from torch.distributed import pipelining

    count, numbers = world * PIPELINES[kind][1], numbers_of(kind, rank, world)
    parts = []
    for number in numbers:
        part = Decoder(model.kept, depth=0)
        part.embedding = model.embedding if number == 0 else None
        part.layers = model.layers[number * PER_STAGE : (number + 1) * PER_STAGE]
        part.norm, part.head = (model.norm, model.head) if number == count - 1 else (None, None)
        parts.append(part)
    stages = [
        pipelining.PipelineStage(compiled(part, way, backend), number, count, torch.device("cpu"))
        for number, part in zip(numbers, parts, strict=True)
    ]
    schedule = getattr(pipelining.schedules, PIPELINES[kind][0])(
        stages if PIPELINES[kind][1] > 1 else stages[0], n_microbatches=4, loss_fn=loss_of
    )

    def step(ids: Tensor) -> list[float]:
        losses: list[Tensor] = []
        given = {"target": ids, "losses": losses} if count - 1 in numbers else {}
        schedule.step(*([ids] if 0 in numbers else []), **given)
        return [loss.item() for loss in losses]

    return step, list(parts)


def statistics(kind: str, model: Decoder, rank: int, world: int) -> BlockStats:
    """Attached to the blocks of this rank, before anything is compiled."""
    blocks = dict(enumerate(model.layers))
    if kind in PIPELINES:
        mine = [PER_STAGE * stage + k for stage in numbers_of(kind, rank, world) for k in range(PER_STAGE)]
        blocks = {number: blocks[number] for number in mine}
    return blockstats.attach(blocks, WIDTH, total=len(model.layers), window=window_of(kind))


def trained(kind: str, kept: str, way: str, rank: int, world: int, *, watched: bool) -> tuple[Any, list[Tensor], Any]:
    """Losses and parameters after three steps, and what the second step showed."""
    torch._dynamo.reset()
    model = built(kept, depth_of(kind))
    stats = statistics(kind, model, rank, world) if watched else None
    step, modules = spread(kind, model, way, backend_of(kept, way), rank, world)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses, values = [], None
    for number, ids in enumerate([batches(1)[0]] * 3):
        if stats is not None:
            stats.count(number == 1)  # in the first step, a pipeline runs its stages on memory without values
        losses += step(ids)
        if stats is not None and number == 1:
            values = stats.flush()
        if number:
            optimizer.step()
        optimizer.zero_grad()
    ends = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]  # type: ignore[operator]
    return losses, [end.detach().clone() for end in ends], values


def cell(kind: str, kept: str, way: str, rank: int, world: int, folder: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    try:
        bare = trained(kind, kept, way, rank, world, watched=False)
    except Exception as error:  # noqa: BLE001  (what torch itself cannot do is told)
        return {"torch cannot": f"{type(error).__name__}: {error}"[:300]}
    watched = trained(kind, kept, way, rank, world, watched=True)
    return {
        "values": watched[2],
        "losses": len(watched[0]),
        "same losses": watched[0] == bare[0],
        "same parameters": len(watched[1]) == len(bare[1]) and all(map(torch.equal, watched[1], bare[1])),
    }


def alone(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """What one process reads of the same batch, by depth and window."""
    found = {}
    for depth in (4, 8):
        for window in (0, TOKENS // 2):
            model = built("none", depth)
            stats = attached(model, window=window)
            (ids,) = batches(1)
            loss_of(model(ids), ids).backward()
            found[f"{depth} {window}"] = stats.flush()
    return found


def distributed_tensors(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Streams that are DTensors: parts of sequences need a window, partial sums are refused."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (world,))
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(5))
    found: dict[str, Any] = {}
    for window in (0, TOKENS // 2):
        for name, place in {"whole": Replicate(), "parts": Shard(1), "sum": Partial()}.items():
            stats = blockstats.attach([nn.Identity()], WIDTH, window=window)
            stats.count()
            local = x.chunk(world, 1)[rank] if name == "parts" else x
            given = DTensor.from_local(local, mesh, [place])
            try:
                stats.taps[0](given, given)
                found[f"{name} {window}"] = stats.flush()
            except ValueError as error:
                found[f"{name} {window}"] = str(error)
    return found


def unnumbered(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Two stages that both start at zero, and a rank whose blocks did not run: every rank hears of it."""
    model, found = built("none", 4), {}
    (ids,) = batches(1)
    stats = blockstats.attach(list(model.layers)[:2], WIDTH, total=4)
    stats.count()
    model(ids)
    found["unnumbered"] = _error(stats.flush)
    stats.detach()
    stats = blockstats.attach({2 * rank: model.layers[0], 2 * rank + 1: model.layers[1]}, WIDTH, total=4)
    stats.count(rank == 0)
    model(ids)
    found["idle"] = _error(stats.flush)
    return found


def _error(act: Callable[[], object]) -> str:
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return ""


CELLS = [(kind, kept, way) for kind in WORLD for kept in CHECKPOINTS for way in COMPILED]
SCENARIOS: dict[str, tuple[int, Scenario]] = {
    "alone": (1, alone),
    "distributed tensors": (2, distributed_tensors),
    "unnumbered": (2, unnumbered),
    **{", ".join(names): (WORLD[names[0]], partial(cell, *names)) for names in CELLS},
}


if __name__ == "__main__":
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
                 "torch.distributed.pipelining", "torch.nn.parallel"):  # fmt: skip
        importlib.import_module(name)
    run_scenarios(SCENARIOS, sys.argv[1:], patience=300)  # compilation on a busy machine
