"""Model folders to stream, and what it means for two runs to be the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rankscope.models.loading import load
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.runs.run import Run


def saved(spec: str, folder: Path, shard: str = "40KB") -> Path:
    """A tiny random model as sharded safetensors."""
    with quiet_transformers():
        load(spec, seed=3).model.save_pretrained(folder, max_shard_size=shard)
    return folder


def same_bits(one: Run, other: Run) -> bool:
    """Whether all rows are the same in the same order, values bit by bit."""
    left, right = (run.table["value"].to_numpy().view(np.int64) for run in (one, other))
    rest = [run.table.drop_columns("value") for run in (one, other)]
    return rest[0].equals(rest[1]) and bool(np.array_equal(left, right))
