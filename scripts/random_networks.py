"""Compare rankscope with the hand-cut twins of random networks, and record the outcome of every verb.

``tests/hostile/generated`` composes a network from a seed: roles of branches, spellings of sums, layouts of the
stream, call patterns, placements of norms, misleading names. Each outcome is right, refused, silently wrong, a raw
exception, or noise (the twin itself moves with roundings)::

    python scripts/random_networks.py --networks 5000 --records records.jsonl   # continues where the file ends
    python scripts/random_networks.py --records records.jsonl --summary         # counts, reasons, seeds of failures
    python scripts/random_networks.py --show 17                                 # one network in full

Verbs on the same network share the structure that was found, or the refusal to find one.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.hostile.generated.judging import judge  # noqa: E402
from tests.hostile.generated.networks import Network  # noqa: E402


def campaign(seeds: range, records: Path) -> None:
    """Judge the networks of these seeds that the file does not have yet, one line each."""
    done = {record["seed"] for record in read(records)}
    started = time.process_time()
    with records.open("a") as file:
        for seed in seeds:
            if seed in done:
                continue
            before = time.process_time()
            outcomes = {verb: [found.kind, found.detail] for verb, found in judge(seed).items()}
            seconds = round(time.process_time() - before, 2)
            file.write(json.dumps({"seed": seed, "seconds": seconds, "outcomes": outcomes}) + "\n")
            file.flush()
            for verb, (kind, detail) in outcomes.items():
                if kind in ("wrong", "raw"):
                    print(f"{seed} {verb}: {kind}: {detail}", flush=True)
    print(f"{time.process_time() - started:.0f} s of processor time")


def read(records: Path) -> list[dict[str, Any]]:
    """The whole lines of the file, by seed; a line that was cut off is left out."""
    if not records.exists():
        return []
    lines = records.read_text().splitlines(keepends=True)
    found = {record["seed"]: record for record in (json.loads(line) for line in lines if line.endswith("}\n"))}
    return [found[seed] for seed in sorted(found)]


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts by verb, refusals by reason, and the seeds of what failed."""
    verbs: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    failures: list[dict[str, Any]] = []
    networks: Counter[str] = Counter()
    for record in records:
        kinds = {kind for kind, _ in record["outcomes"].values()}
        worst = next(kind for kind in ("wrong", "raw", "noise", "refused", "right") if kind in kinds)
        networks[worst] += 1
        for verb, (kind, detail) in record["outcomes"].items():
            verbs[verb][kind] += 1
            if kind == "refused":
                reasons[verb][detail] += 1
            elif kind in ("wrong", "raw"):
                failures.append({"seed": record["seed"], "verb": verb, "kind": kind, "detail": detail})
    return {
        "date": date.today().isoformat(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "networks": len(records),
        "seeds": [records[0]["seed"], records[-1]["seed"]],
        "networks_by_worst_outcome": dict(networks),
        "verbs": {verb: dict(counts) for verb, counts in verbs.items()},
        "refusals": {verb: dict(counts.most_common()) for verb, counts in reasons.items()},
        "failures": failures,
    }


def show(seed: int) -> None:
    """One network: what was drawn, and every outcome with its message."""
    network = Network(seed)
    print(network.facts)
    print(network)
    for verb, found in judge(seed).items():
        print(f"- {verb}: {found.kind} {found.message or found.detail}")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=0, help="how many")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--step", type=int, default=1, help="distance of seeds, to share them among processes")
    parser.add_argument("--records", type=Path, help="a line for each network; existing ones are not repeated")
    parser.add_argument("--summary", action="store_true", help="print what came of the records")
    parser.add_argument("--show", type=int, metavar="SEED", help="print one network and its outcomes")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.show is not None:
        show(options.show)
    if options.networks:
        campaign(range(options.first, options.first + options.networks * options.step, options.step), options.records)
    if options.summary:
        print(json.dumps(summary(read(options.records)), indent=1))


if __name__ == "__main__":
    main()
