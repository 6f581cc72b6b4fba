"""Search for networks that break a statement of ``bound``, by gradient descent on its slack.

Every statement marked Bound is searched in turn, the one with the least CPU time first; a search starts from a network
drawn from its seed (``tests/ext/theory/theorems/attacking.py``), and every statement is evaluated on what it finds.
The two statements that build their own example are evaluated over their parameters instead. Time is CPU time of this
process. The state is written every half minute and taken up again, per version of the sources that are searched;
several processes may run side by side, each with a part of its own::

    python scripts/attack_bounds.py --state attack --hours 2
    python scripts/attack_bounds.py --state attack --part 1 --hours 2 --until 01:40
    python scripts/attack_bounds.py --state attack --record          # adds the figures to docs/data/attack.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402

from rankscope.ext.theory.theorems import THEOREMS, LayerQuantities, Network  # noqa: E402
from rankscope.ext.theory.theorems._quantities import HeadSizes  # noqa: E402
from tests.ext.theory.theorems.attacking import SLACKS, attack  # noqa: E402

FIGURES = ROOT / "docs" / "data" / "attack.json"
CONSTRUCTIONS = ("dong_2021_skip", "wu_2024_equilibria")
SEEDS_PER_PART = 1_000_000_000
SAVED_EVERY = 30.0


def version() -> str:
    """Of what is searched: the theory that the statements use, and how ``bound`` reads a layer."""
    theory = ROOT / "src/rankscope/ext/theory"
    sources = [*sorted(theory.glob("*.py")), *sorted((theory / "theorems").glob("*.py"))]
    sources += sorted((ROOT / "src/rankscope/ext/theory/bound").glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def construction(name: str, seed: int) -> tuple[float, list[str]]:
    """The slack of a statement that builds its own example, for the beta and the depth of this seed."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(2, generator=generator, dtype=torch.float64)
    beta, depth = 10 ** (20 * float(draw[0]) - 10), 1 + int(64 * draw[1])
    head = HeadSizes(beta, beta, 1.0, 1.0, 1.0, 1.0)
    layers = [LayerQuantities(number, (head,), 1.0) for number in range(depth)]
    found = THEOREMS[name].function(Network(depth, 1, 4, has_skip=True), layers)
    bounds = [*found.layers, *([found.depth] if found.depth is not None else [])]
    slack = min((b.log_slack for b in bounds if b.log_slack is not None), default=math.inf)
    return slack / math.log(10), [f"{name}: {b}" for b in found.violated]


def fresh(name: str) -> dict[str, Any]:
    """Nothing known of a statement."""
    return {
        "statement": name,
        "cpu_seconds": 0.0,
        "searches": 0,
        "applied": 0,
        "least_slack": None,
        "seed": None,
        "broken": [],
    }


def searched(entry: dict[str, Any], seed: int, everything: dict[str, dict[str, Any]]) -> None:
    """One search on a statement; what it finds of the others is noted with them."""
    name, started = entry["statement"], time.process_time()
    if name in SLACKS:
        outcome = attack(name, seed)
        slacks, broken = outcome.slacks, outcome.broken
    else:
        slack, broken = construction(name, seed)
        slacks = {name: slack}
    for other, slack in slacks.items():
        known = everything[other]
        known["applied"] += other == name
        if math.isfinite(slack) and (known["least_slack"] is None or slack < known["least_slack"]):
            known["least_slack"], known["seed"] = slack, f"{name}:{seed}"
    for words in broken:
        everything[words.split()[0].rstrip(":")]["broken"].append(f"{name}:{seed} {words}")
    entry["searches"] += 1
    entry["cpu_seconds"] += time.process_time() - started


def campaign(folder: Path, part: int, hours: float, until: datetime | None) -> None:
    """Search until the CPU time or the clock is up."""
    torch.set_num_threads(1)
    path, mark = folder / f"part{part}.json", version()
    state = json.loads(path.read_text()) if path.exists() else {}
    names = [*SLACKS, *CONSTRUCTIONS]
    everything = state.setdefault(mark, {name: fresh(name) for name in names})
    saved = time.monotonic()
    while sum(e["cpu_seconds"] for e in everything.values()) < 3600 * hours:
        entry = min(
            everything.values(), key=lambda e: e["cpu_seconds"] * (20 if e["statement"] in CONSTRUCTIONS else 1)
        )
        searched(entry, part * SEEDS_PER_PART + entry["searches"], everything)
        over = until is not None and datetime.now() >= until
        if over or time.monotonic() - saved > SAVED_EVERY:
            write(path, state)
            report(everything)
            saved = time.monotonic()
        if over:
            break
    write(path, state)
    report(everything)


def write(path: Path, state: dict[str, Any]) -> None:
    """All or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(state, indent=1) + "\n")
    path.with_suffix(".new").replace(path)


def report(everything: dict[str, dict[str, Any]]) -> None:
    """A line for each statement."""
    print(f"{datetime.now():%H:%M:%S} {sum(e['cpu_seconds'] for e in everything.values()):.0f} s of CPU")
    for entry in everything.values():
        slack = "none" if entry["least_slack"] is None else f"{entry['least_slack']:.3g}"
        print(
            f"  {entry['statement']:24} {entry['cpu_seconds']:7.0f} s {entry['searches']:6} searches "
            f"{entry['applied']:6} applied, least slack {slack} decades ({entry['seed']}), "
            f"broken {len(entry['broken'])}",
            flush=True,
        )


def record(folder: Path) -> None:
    """The figures of this version, all parts together, into the documentation's data."""
    mark, together = version(), {}
    for path in sorted(folder.glob("part*.json")):
        for name, entry in json.loads(path.read_text()).get(mark, {}).items():
            known = together.setdefault(name, fresh(name))
            for key in ("cpu_seconds", "searches", "applied", "broken"):
                known[key] += entry[key]
            if entry["least_slack"] is not None and (
                known["least_slack"] is None or entry["least_slack"] < known["least_slack"]
            ):
                known["least_slack"], known["seed"] = entry["least_slack"], entry["seed"]
    for known in together.values():
        known["cpu_seconds"] = round(known["cpu_seconds"])
    figures = {
        "date": date.today().isoformat(),
        "version": mark,
        "torch": torch.__version__,
        "cpu_seconds": sum(e["cpu_seconds"] for e in together.values()),
        "statements": list(together.values()),
    }
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"{FIGURES}: {figures['cpu_seconds']} s of CPU")


def clock(words: str) -> datetime:
    """The next time it is this late."""
    hour, minute = (int(word) for word in words.split(":"))
    now = datetime.now()
    then = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return then if then > now else then + timedelta(days=1)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--state", type=Path, required=True, help="folder of the state, one file per part")
    parser.add_argument("--part", type=int, default=0, help="number of this process; parts draw different seeds")
    parser.add_argument("--hours", type=float, default=2.0, help="CPU hours of this part")
    parser.add_argument("--until", type=clock, help="time of the clock at which to stop, such as 01:40")
    parser.add_argument("--record", action="store_true", help="write docs/data/attack.json from the state and stop")
    given = parser.parse_args()
    if given.record:
        record(given.state)
    else:
        campaign(given.state, given.part, given.hours, given.until)


if __name__ == "__main__":
    main()
