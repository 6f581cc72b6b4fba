"""A run that is killed between two flushes and resumed from its checkpoint counts nothing twice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from rankscope import blockstats
from tests.blockstats.nets import SEQUENCES, TOKENS, WIDTH, batches, decoder, loss_of

EVERY, SAVED, KILLED, LAST = 4, 5, 6, 8


def train(folder: Path, killed_at: int | None = None) -> None:
    """Flushes after every fourth step, saves after the fifth."""
    torch.set_num_threads(1)
    model = decoder("not reentrant")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 0
    if (folder / "saved.pt").exists():
        saved = torch.load(folder / "saved.pt")
        model.load_state_dict(saved["model"])
        first = saved["step"]
    stats = blockstats.attach(model.layers, WIDTH)
    stats.count()
    for step, ids in enumerate(batches(LAST)):
        if step < first:
            continue
        loss_of(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == killed_at:
            os._exit(9)
        if step + 1 == SAVED:
            torch.save({"model": model.state_dict(), "step": step + 1}, folder / "saved.pt")
        if (step + 1) % EVERY == 0:
            with (folder / "rows.jsonl").open("a") as file:
                file.write(json.dumps({"step": step + 1, **stats.flush()}) + "\n")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_killed_and_resumed(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    codes = []
    for folder, killed_at in ((whole, None), (resumed, KILLED), (resumed, None)):
        folder.mkdir(exist_ok=True)
        # Not forked: after a backward pass in this process, autograd runs in no fork of it.
        process = mp.get_context("spawn").Process(target=train, args=(folder, killed_at))
        process.start()
        process.join(60)
        codes.append(process.exitcode)
    assert codes == [0, 9, 0]
    (first, last), (kept, after) = rows(whole), rows(resumed)
    assert kept == first
    # Step 5 was counted by the process that died, and is lost; step 6 ran twice and counts once.
    assert last["tokens/0"] == 4 * SEQUENCES * TOKENS
    assert after["tokens/0"] == 3 * SEQUENCES * TOKENS
    assert after["relative_residual/3"] != last["relative_residual/3"]
