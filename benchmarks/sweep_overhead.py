"""What a sweep costs beside a bare Python loop over the same tasks, on the same cores.

Each contestant is a process pinned to the same cores, timed from start to end, imports and Ray included: a loop that
calls the verb and keeps nothing, ``sweep --serial``, processes that share a folder (``--shard``), one per core, and
``sweep`` on a Ray of its own with as many workers as cores.
The marginal ratio leaves the start out: it is that of the seconds between one task and all of them. With several
cores the loop is a pool of processes. Run it on a quiet machine with::

    python -m benchmarks.sweep_overhead --tasks 60 --rounds 3      # about three quarters of an hour

On a noisy machine ``--in-turn`` compares processor time instead: loop, ``--serial`` and ``--shard`` do two tasks each
in turn, in one process and in an order that changes, so that a slow minute is slow for all. Starting is then not
counted, and Ray, whose workers are other processes, is left out. It adds its part to the same record::

    python -m benchmarks.sweep_overhead --in-turn --tasks 2 --rounds 9      # about ten minutes
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "docs" / "data" / "sweep_overhead.json"
CONTESTANTS = ("loop", "serial", "shard", "ray")


def plan(model: str, tasks: int) -> dict[str, Any]:
    """One model with as many seeds as tasks."""
    return {"models": [model], "verbs": ["measure"], "seeds": list(range(tasks)),
            "inputs": {"sequences": 8, "tokens": 128, "batch": 8}}  # fmt: skip


def one(job: tuple[str, int]) -> int:
    import rankscope as rs

    return rs.measure(rs.Model(job[0], seed=job[1]), rs.Inputs(sequences=8, tokens=128, batch=8)).table.num_rows


def share(job: tuple[dict[str, Any], str, str]) -> None:
    import rankscope as rs

    rs.sweep(job[0], job[1], shard=job[2])


def run_here(contestant: str, model: str, tasks: int, cores: int) -> None:
    """The whole work of one contestant; the caller has the clock."""
    if contestant == "loop":
        jobs = [(model, seed) for seed in range(tasks)]
        if cores == 1:
            for job in jobs:
                one(job)
        else:
            with multiprocessing.get_context("spawn").Pool(cores) as pool:
                pool.map(one, jobs, chunksize=1)
        return
    import rankscope as rs

    with tempfile.TemporaryDirectory() as folder:
        if contestant == "shard":
            jobs = [(plan(model, tasks), folder, f"{number}/{cores}") for number in range(cores)]
            with multiprocessing.get_context("spawn").Pool(cores) as pool:
                pool.map(share, jobs, chunksize=1)
            return
        status = rs.sweep(plan(model, tasks), folder, serial=contestant == "serial", workers=cores)
        if not status.complete:
            raise SystemExit(str(status))


def seconds(contestant: str, model: str, tasks: int, cores: int) -> float:
    """Wall time of a contestant in a process of its own, one thread per process, pinned to the first cores."""
    words = [sys.executable, "-m", "benchmarks.sweep_overhead", "--here", contestant, "--model", model]
    words += ["--tasks", str(tasks), "--cores", str(cores)]
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    started = time.perf_counter()
    subprocess.run(words, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL,
                   preexec_fn=lambda: os.sched_setaffinity(0, chosen))  # fmt: skip
    return time.perf_counter() - started


def described(times: dict[str, dict[int, list[float]]], tasks: int) -> dict[str, Any]:
    """Medians over the rounds; ratios are taken within a round, whose contestants ran one after the other."""
    rounds = range(len(times["loop"][tasks]))

    def ratio(name: str, start: bool) -> float:
        def spent(who: str, number: int) -> float:
            return times[who][tasks][number] - (0.0 if start else times[who][1][number])

        return round(statistics.median(spent(name, number) / spent("loop", number) for number in rounds), 4)

    return {
        "rounds": len(rounds),
        "seconds": {name: round(statistics.median(by[tasks]), 2) for name, by in times.items()},
        "seconds of one task": {name: round(statistics.median(by[1]), 2) for name, by in times.items()},
        "ratio": {name: ratio(name, True) for name in times},
        "marginal ratio": {name: ratio(name, False) for name in times},
        "every round": {name: {str(count): found for count, found in by.items()} for name, by in times.items()},
    }


def in_turn(model: str, tasks: int, rounds: int) -> dict[str, Any]:
    """Processor seconds of loop, serial sweep and a shard that has all tasks, and the medians of their ratios."""
    import torch

    import rankscope as rs

    def loop(folder: str) -> None:
        for seed in range(tasks):
            one((model, seed))

    runs: dict[str, Callable[[str], object]] = {
        "loop": loop,
        "serial": lambda folder: rs.sweep(plan(model, tasks), folder, serial=True),
        "shard": lambda folder: rs.sweep(plan(model, tasks), folder, shard="0/1"),
    }
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-1, rounds):  # the first round imports, and does not count
        for name in sorted(runs, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory() as folder:
                started = time.process_time()
                runs[name](folder)
                taken = time.process_time() - started
            if number >= 0:
                times[name].append(round(taken, 3))
        print(f"round {number + 1}: { {name: found[-1:] for name, found in times.items()} }", flush=True)
    ratios = {
        name: round(statistics.median(mine / bare for mine, bare in zip(found, times["loop"], strict=True)), 4)
        for name, found in times.items()
    }
    return {"date": date.today().isoformat(), "model": model, "tasks": tasks, "ratio": ratios, "seconds": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--model", default="init:bert-base")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--in-turn", action="store_true", help="processor time, in one process")
    parser.add_argument("--here", choices=CONTESTANTS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        run_here(asked.here, asked.model, asked.tasks, asked.cores)
        return
    earlier = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {}
    if asked.in_turn:
        answer = {**earlier, "in turn": in_turn(asked.model, asked.tasks, asked.rounds)}
        asked.out.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(answer["in turn"], indent=1))
        return
    times: dict[str, dict[int, list[float]]] = {name: {1: [], asked.tasks: []} for name in CONTESTANTS}
    for number in range(asked.rounds):
        for tasks in (1, asked.tasks):
            for name in CONTESTANTS:
                times[name][tasks].append(seconds(name, asked.model, tasks, asked.cores))
                print(f"round {number + 1}: {name}, {tasks} tasks, {times[name][tasks][-1]:.1f} s", flush=True)
    answer = {"date": date.today().isoformat(), "model": asked.model, "tasks": asked.tasks, "cores": asked.cores}
    answer |= described(times, asked.tasks)
    answer |= {"in turn": earlier["in turn"]} if "in turn" in earlier else {}
    asked.out.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
