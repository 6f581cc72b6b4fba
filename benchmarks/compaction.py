"""Compacts a sweep of many tasks, killed at random moments, and asks it questions.

The tasks are copies of one real result with their own keys, models and seeds, so that the files have the schema of a
sweep. Each kill is followed by a check that every task is there exactly once; the last compaction runs to its end. Run
it with::

    python -m benchmarks.compaction --tasks 100000 --kills 20      # about half an hour
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq

import rankscope as rs
from rankscope.ext.sweeps.folder import Expected, SweepFolder
from rankscope.ext.sweeps.status import status_of

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "docs" / "data" / "compaction.json"
METRICS = ["relative_residual", "mean_cosine", "stable_rank", "effective_rank", "largest_token_share"]
PLAN = {"models": ["init:tiny-bert"], "verbs": [{"measure": {"metrics": METRICS}}],
        "inputs": {"sequences": 4, "tokens": 16}}  # fmt: skip
QUESTIONS = {
    "one metric": "SELECT model, layer, avg(value) AS mean FROM rows WHERE metric = 'stable_rank' GROUP BY ALL",
    "every row": "SELECT metric, site, layer, count(*) AS n, avg(value) AS mean FROM rows GROUP BY ALL",
    "every task": "SELECT state, count(*) AS n, sum(rows) AS rows FROM tasks GROUP BY state",
}


def fill(folder: Path, tasks: int) -> int:
    """Write the results of many tasks as a sweep does, but without waiting for the disk; the number of rows of each."""
    with tempfile.TemporaryDirectory() as place:
        rs.sweep(PLAN, place, serial=True)
        contents = SweepFolder(Path(place)).contents()
        (key,) = contents.done
        record = contents.record(key)
        table = pq.ParquetFile(Path(place) / record["table"]["file"]).read()
    expected = [Expected(f"{i:024x}", {**record["task"], "seed": i, "model": f"model {i % 500}"}) for i in range(tasks)]
    home = SweepFolder(folder)
    home.begin(expected)
    facts = {name: value for name, value in record.items() if name not in ("schema", "key", "task", "table")}
    columns = {name: table[name] for name in table.column_names}
    with mock.patch.object(os, "fsync"):
        for one in expected:
            own = {"task": one.key, "model": one.task["model"], "seed": one.task["seed"]}
            for name, value in own.items():
                place_of = table.schema.get_field_index(name)
                columns[name] = _constant(value, table.schema.field(place_of).type, table.num_rows)
            home.keep_rows(one, type(table).from_pydict(columns), facts)
    return table.num_rows


def _constant(value: Any, kind: Any, count: int) -> Any:
    import pyarrow as pa

    return pa.repeat(pa.scalar(value, kind), count)


def compacting(folder: Path, seconds: float | None) -> float | None:
    """Compact in a process of its own, killed after some seconds; how long it took, None if it was killed."""
    started = time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", "rankscope", "sweep", "compact", str(folder), "--quiet"]) as process:
        try:
            if process.wait(seconds):
                raise SystemExit(f"compact ended with {process.returncode}")
        except subprocess.TimeoutExpired:
            process.kill()
            return None
    return time.perf_counter() - started


def asked(folder: Path, sql: str) -> dict[str, Any]:
    """Seconds and peak memory of a query in a process of its own, its imports included."""
    program = "import sys, rankscope as rs; print(rs.query(sys.argv[1], sys.argv[2]).num_rows)"
    started = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", program, str(folder), sql], stdout=subprocess.PIPE) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the query ended with {process.returncode}")
    return {"seconds": round(time.perf_counter() - started, 2), "peak MiB": used.ru_maxrss // 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--longest", type=float, default=60.0, help="seconds after which a compaction is killed at most"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "sweep"
        rows = fill(folder, given.tasks)
        print(f"{given.tasks} tasks of {rows} rows", flush=True)
        keys = {one.key for one in SweepFolder(folder).expected()}
        for number in range(given.kills):
            took = compacting(folder, chance.uniform(0.5, given.longest))
            contents = SweepFolder(folder).contents()
            packed = sum(len(pack.keys) for pack in contents.packs)
            if contents.done != keys or packed + len(contents.loose) != given.tasks:
                raise SystemExit(f"after kill {number + 1}: {len(contents.done)} tasks, {packed} of them in packs")
            print(f"kill {number + 1}: {packed} tasks in packs{'' if took is None else ', it had ended'}", flush=True)
        seconds = compacting(folder, None)
        totals = rs.query(
            folder, "SELECT count(*) AS n, count(DISTINCT task) AS t, sum(seed) AS s FROM rows"
        ).to_pylist()
        if totals != [{"n": rows * given.tasks, "t": given.tasks, "s": rows * given.tasks * (given.tasks - 1) // 2}]:
            raise SystemExit(f"wrong rows: {totals}")
        started = time.perf_counter()
        status = status_of(folder)
        answer = {
            "date": date.today().isoformat(),
            "tasks": given.tasks,
            "rows": rows * given.tasks,
            "kills": given.kills,
            "packs": len(SweepFolder(folder).contents().packs),
            "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
            "last compaction, seconds": round(seconds or 0.0, 1),
            "status, seconds": round(time.perf_counter() - started, 2),
            "queries": {name: asked(folder, sql) for name, sql in QUESTIONS.items()},
            "largest child, MiB": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
        }
        if not (status.complete and status.rows == rows * given.tasks):
            raise SystemExit(str(status))
    given.out.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
