"""Several ranks, each with its share of the batches: ``sync_program.py WORLD FOLDER``; imports are done once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import rankscope.monitor.stateful as stateful
from tests.monitor.stateful.batches import attention_batches, token_batches

NAMES = ("RelativeResidual", "MeanCosine", "StableRank", "LargestTokenShare", "AttentionEntropy")


def results(rank: int, world: int) -> dict[str, tuple[float, int, int]]:
    """Mean, number of values and number without a value, after this rank's share of the batches."""
    found = {}
    for name in NAMES:
        metric = getattr(stateful, name)()
        batches = attention_batches() if name == "AttentionEntropy" else token_batches()
        for batch in batches[rank::world]:
            metric.update(*batch)
        value = metric.compute()
        with metric.sync_context(should_sync=world > 1):
            found[name] = (float(value), int(metric.count), int(metric.undefined))
    between = stateful.RelativeResidualBetweenInputs()
    for batch in token_batches()[rank::world]:
        between.update(*batch)
    found["between inputs"] = (float(between.compute()), 0, 0)
    return found


def rank_of(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    Path(folder, f"{rank}.json").write_text(json.dumps(results(rank, world)))
    dist.destroy_process_group()


if __name__ == "__main__":
    world, folder = int(sys.argv[1]), sys.argv[2]
    mp.start_processes(rank_of, args=(world, folder), nprocs=world, start_method="fork")
