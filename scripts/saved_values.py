"""Runs of an earlier commit, computed again with this one: which values have the same bits, and why others do not.

    git worktree add --detach OLD COMMIT
    python scripts/saved_values.py OLD/src          # a few minutes on one core; writes docs/data/saved_values.json

The commands run once with either source tree, in a process for each tree, with one thread. Rows are matched by all
columns but value and status; a row that only one of the two has is counted. Exits with 1 if a value differs without a
reason in ``REASONS``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "saved_values.json"
SMALL = "--sequences 2 --tokens 16"
COMMANDS = (
    *(f"measure init:tiny-{name} {SMALL}" for name in ("bert", "gpt2", "llama", "t5", "vit", "mixtral", "xlnet")),
    f"measure init:deep-bert {SMALL}",
    f"measure init:tiny-gpt2 {SMALL} --null --seed 3",
    "measure init:tiny-gpt2 --sequences 2 --lengths 8,16,32",
    f"measure init:tiny-llama {SMALL} --dtype bfloat16",
    f"measure init:tiny-bert {SMALL} --metrics effective_rank,uniformity --sites attention.sum,mlp.sum",
    f"ablate init:tiny-bert {SMALL}",
    f"ablate init:tiny-llama {SMALL}",
    f"exact init:tiny-bert {SMALL} --skip 0",
    f"exact init:tiny-gpt2 {SMALL} --skip 0 --mlp drop",
    f"decompose init:tiny-bert {SMALL}",
    f"bound init:tiny-bert {SMALL}",
    "predict init:tiny-bert --depth 6 --tokens 16",
    f"remedy init:tiny-bert {SMALL}",
)
REASONS: dict[str, str] = {
    "attention_entropy": "p log p of narrow formats is a logarithm and a product, four times as fast as xlogy, which "
    "rounds differently in the last bit",
}
"""By metric, or by verb: why its values are others on purpose."""
Rows = dict[tuple[object, ...], tuple[float | None, str]]


PROGRAM = """
import json, sys
from rankscope.cli.app import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as left:
        if left.code:
            raise
"""


def run_all(source: Path, folder: Path) -> None:
    """Run every command with one source tree; run NUMBER is in ``folder/NUMBER``."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    runs = [[*words.split(), "--quiet", "--out", str(folder / str(place))] for place, words in enumerate(COMMANDS)]
    subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(runs)], env=environment, cwd=folder, check=True)


def rows_of(folder: Path) -> Rows:
    """The rows of a run."""
    table = pq.read_table(next(folder.glob("rows-*.parquet")))
    where = sorted(name for name in table.column_names if name not in ("value", "status", "low", "high"))
    keys = zip(*(table[name].to_pylist() for name in where), strict=True)
    values = zip(table["value"].to_pylist(), map(str, table["status"].to_pylist()), strict=True)
    named = (tuple(item for item in zip(where, key, strict=True) if item[1] is not None) for key in keys)
    return dict(zip(named, values, strict=True))


def bits(value: float | None) -> str:
    """Equal for equal bits; all NaN are one."""
    return "none" if value is None or value != value else value.hex()


def compared(command: str, old: Rows, new: Rows) -> dict[str, Any]:
    """How many values are equal to the bit, and the largest relative difference of the others, by metric."""
    both = old.keys() & new.keys()
    others: dict[str, float] = {}
    for key in both:
        (was, status), (now, status_now) = old[key], new[key]
        if bits(was) != bits(now) or status != status_now:
            gap = abs(now - was) / max(abs(was), abs(now)) if was and now and status == status_now else float("inf")
            metric = str(dict(key).get("metric"))  # type: ignore[call-overload]
            others[metric] = max(gap, others.get(metric, 0.0))
    verb = command.split()[0]
    reasons = {metric: REASONS.get(metric, REASONS.get(verb, "")) for metric in others}
    equal = sum(bits(old[key][0]) == bits(new[key][0]) and old[key][1] == new[key][1] for key in both)
    return {
        "command": command,
        "rows": len(both),
        "equal": equal,
        "only_before": len(old.keys() - new.keys()),
        "only_now": len(new.keys() - old.keys()),
        "largest_difference": others,
        "reasons": reasons,
    }


def main() -> int:
    """Run every command twice, compare, and write the record."""
    before = Path(sys.argv[1]).resolve()
    commits = [
        subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=place, capture_output=True, text=True, check=True
        ).stdout.strip()
        for place in (before, ROOT)
    ]
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        places = [Path(scratch) / name for name in ("before", "now")]
        for place, source in zip(places, (before, ROOT / "src"), strict=True):
            place.mkdir()
            run_all(source, place)
        for number, command in enumerate(COMMANDS):
            found.append(compared(command, *(rows_of(place / str(number)) for place in places)))
            print(json.dumps(found[-1]), flush=True)
    DATA.write_text(json.dumps({"date": date.today().isoformat(), "commits": commits, "runs": found}, indent=1) + "\n")
    unexplained = [(one["command"], name) for one in found for name, why in one["reasons"].items() if not why]
    for entry in unexplained:
        print("differs:", *entry)
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
