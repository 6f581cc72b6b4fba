"""Several real processes with gloo between them, forked after the imports so that none of them pays for these."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Scenario = Callable[[int, int, Path], Any]
"""Rank, number of ranks and a folder of its own, to JSON."""


ROOT = Path(__file__).resolve().parents[1]


def run_program(place: str, folder: Path, patience: float = 400, scenarios: Iterable[str] = ()) -> Path:
    """Run a program of the tests in a Python of its own; gives back ``folder``, below which it writes its scenarios."""
    words = [sys.executable, str(ROOT / place), str(folder), *scenarios]
    around = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=around, capture_output=True, text=True, timeout=patience, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def run_scenarios(scenarios: Mapping[str, tuple[int, Scenario]], words: list[str], patience: float = 60) -> None:
    """What such a program does: every scenario, or those named, each in a folder of its own below ``words[0]``."""
    for name in words[1:] or list(scenarios):
        world, scenario = scenarios[name]
        run_forked(world, scenario, Path(words[0]) / name, patience)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_forked(world: int, scenario: Scenario, home: Path, patience: float = 60) -> None:
    """Let every rank write what it gives back to ``home/RANK.json``, and how they ended to ``home/ended.json``."""
    home.mkdir(parents=True)
    started = time.perf_counter()
    context = mp.get_context("fork")
    port = free_port()
    ranks = [context.Process(target=_rank, args=(rank, world, port, scenario, home)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=patience)
    codes = ["hung" if process.is_alive() else process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    seconds = time.perf_counter() - started
    (home / "ended.json").write_text(json.dumps({"codes": codes, "seconds": seconds}))
    print(home.name, codes, f"{seconds:.1f} s", flush=True)


def _rank(rank: int, world: int, port: int, scenario: Scenario, home: Path) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    found = scenario(rank, world, home)
    (home / f"{rank}.json").write_text(json.dumps(found))
    if world > 1:
        dist.destroy_process_group()
