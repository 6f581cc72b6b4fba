"""The command line: ``train`` and ``evaluate``."""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from pathlib import Path

import torch

from benchmarks.failing_runs.declared import RUNS, SETS
from benchmarks.failing_runs.training import DONE, SIZES, run


def one(name: str, seed: int, size: str, keep: Path, live: bool) -> str:
    """Train one run in a process of its own; what went wrong, if anything did."""
    torch.set_num_threads(1)
    try:
        run(RUNS[name], seed, size, folder_of(keep, name, seed, size), live=live)
    except Exception as error:  # noqa: BLE001 - one run that fails is reported, and the others go on
        return f"{name}, seed {seed}: {type(error).__name__}: {error}"
    return ""


def folder_of(keep: Path, name: str, seed: int, size: str) -> Path:
    """Where a run is stored."""
    return keep / size / name.replace(",", "").replace(" ", "-") / str(seed)


def train(options: argparse.Namespace) -> int:
    """Train what is missing."""
    offered = [declared.name for name in options.set for declared in SETS[name]]
    offered = [name for name in offered if RUNS[name].fault is None or not options.healthy]
    names = [name for name in offered if not options.only or any(word in name for word in options.only)]
    wanted = [(name, seed) for seed in options.seeds for name in names]
    missing = [
        (name, seed) for name, seed in wanted if not (folder_of(options.keep, name, seed, options.size) / DONE).exists()
    ]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} runs are there", flush=True)
    failed = 0
    with ProcessPoolExecutor(options.workers) as pool:
        jobs = [pool.submit(one, name, seed, options.size, options.keep, options.live) for name, seed in missing]
        for done, job in enumerate(as_completed(jobs), 1):
            if job.result():
                failed += 1
                print(job.result(), flush=True)
            elif done % 10 == 0:
                print(f"{done} of {len(missing)} trained", flush=True)
    return failed


def evaluate(options: argparse.Namespace) -> int:
    """Print what every detector says about the stored runs."""
    from benchmarks.failing_runs.evaluating import facts_of, page, stored, summary, table

    runs = [facts_of(run) for size in options.size for run in stored(options.keep, size, options.seeds)]
    print(table(runs))
    found = summary(runs)
    print(json.dumps(found, indent=1))
    if options.out is not None:
        told = {"date": date.today().isoformat(), "size": options.size, "summary": found, "runs": runs}
        options.out.write_text(json.dumps(told, indent=1) + "\n")
        options.out.with_suffix(".inc").write_text(page(runs))
    return 0


def main() -> int:
    """Read the arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failing_runs", description=__doc__)
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train", help="train every run that is not stored yet")
    training.add_argument("--keep", type=Path, required=True, help="folder of the runs")
    training.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    training.add_argument("--size", choices=SIZES, default="tiny")
    training.add_argument("--set", choices=SETS, nargs="+", default=list(SETS))
    training.add_argument("--only", nargs="+", help="names of runs, or parts of names")
    training.add_argument("--healthy", action="store_true", help="the healthy runs only, for the rate of false alarms")
    training.add_argument("--workers", type=int, default=2)
    training.add_argument("--live", action="store_true", help="raise alarms and look for causes while training")
    training.set_defaults(act=train)
    evaluating = commands.add_parser("evaluate", help="evaluate detectors on the stored runs")
    evaluating.add_argument("--keep", type=Path, required=True, help="folder of the runs")
    evaluating.add_argument("--seeds", type=int, nargs="+", help="all that are stored, if not given")
    evaluating.add_argument("--size", choices=SIZES, nargs="+", default=["tiny"])
    evaluating.add_argument("--out", type=Path, help="file for the numbers; the tables are written beside it (.inc)")
    evaluating.set_defaults(act=evaluate)
    options = parser.parse_args()
    return int(options.act(options))


if __name__ == "__main__":
    raise SystemExit(main())
