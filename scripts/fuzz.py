"""Feed damaged input to every reader of something a stranger wrote, and keep what none should do.

A finding is anything but a clean read or an error of ours in words: another exception, a case that takes longer than
ten seconds, memory above the limit, a file opened for writing outside the case's folder, a program or a connection
started. Findings are stored as ``tests/fuzz/findings/TARGET/HASH.bin`` and replayed by the tests ever after::

    python scripts/fuzz.py --cases 1000000                    # over all targets, by their weights
    python scripts/fuzz.py --cases 20000 mask-npz condition   # over some
    python scripts/fuzz.py --guided 60 mask-words             # guided by coverage (atheris), for so many seconds

The figures of a campaign are added to ``docs/data/fuzz.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.fuzz.mutating import mutated  # noqa: E402
from tests.fuzz.targets import TARGETS, Target, outcome  # noqa: E402

FINDINGS = ROOT / "tests" / "fuzz" / "findings"
FIGURES = ROOT / "docs" / "data" / "fuzz.json"
SECONDS_PER_CASE = 10
MEMORY = 6 * 2**30
WARM_UP = 200
STARTERS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "pickle.find_class")


class Trespass(BaseException):
    """Something happened that reading a file must never do."""


class Guard:
    """An audit hook: while a case runs, nothing is written outside its folder and nothing is started."""

    def __init__(self) -> None:
        self.folder: str | None = None
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in STARTERS:
            raise Trespass(f"{event} {arguments!r:.200}")
        if event == "open" and isinstance(arguments[0], str):
            mode, flags = arguments[1], arguments[2] or 0
            writes = any(letter in (mode or "") for letter in "wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            place = os.path.realpath(arguments[0])
            if writes and not place.startswith(self.folder) and place != "/dev/null":
                raise Trespass(f"open {arguments[0]!r} for writing")


@contextmanager
def watched(guard: Guard, folder: Path) -> Iterator[None]:
    """The guard is awake and the clock runs."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_CASE)
    guard.folder = os.path.realpath(folder)
    try:
        yield
    finally:
        guard.folder = None
        signal.setitimer(signal.ITIMER_REAL, 0)


def campaign(target: Target, cases: int, seed: int, guard: Guard) -> dict[str, Any]:
    """So many cases of one target; findings are stored as they come."""
    chance = random.Random(f"{target.name}:{seed}")
    seeds, counts, started = target.seeds(), Counter[str](), time.perf_counter()
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-"))
    for number in range(cases):
        data = chance.choice(seeds) if number == 0 else mutated(seeds, target.words, chance)
        # Imports of the first cases may write caches and are not what is looked for.
        counts[one_case(target, data, scratch, guard if number >= min(WARM_UP, cases // 2) else None)] += 1
    shutil.rmtree(scratch)
    seconds = round(time.perf_counter() - started, 1)
    return {"cases": cases, "read": counts["read"], "refused": counts["refused"], "found": counts["found"],
            "seconds": seconds, "seed": seed}  # fmt: skip


def one_case(target: Target, data: bytes, scratch: Path, guard: Guard | None) -> str:
    """``"read"``, ``"refused"`` or ``"found"``."""
    for left in scratch.iterdir():
        left.unlink()
    try:
        if guard is None:
            return outcome(target, data, scratch)
        with watched(guard, scratch):
            return outcome(target, data, scratch)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - anything at all is a finding
        keep_finding(target, data, error)
        return "found"


def keep_finding(target: Target, data: bytes, error: BaseException) -> None:
    """Store the case under its hash, one per place of failure and run."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{type(error).__name__} at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else repr(error)
    if (target.name, place) in _SEEN:
        return
    _SEEN.add((target.name, place))
    folder = FINDINGS / target.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{hashlib.sha256(data).hexdigest()[:16]}.bin").write_bytes(data)
    print(f"FOUND {target.name}: {place}: {error!s:.200}\n   {data[:160]!r}", flush=True)


_SEEN: set[tuple[str, str]] = set()


def guided(target: Target, seconds: int) -> None:
    """Coverage-guided cases of one target, until the time is up or something is found."""
    import atheris

    scratch = Path(tempfile.mkdtemp(prefix="fuzz-"))
    corpus = Path(tempfile.mkdtemp(prefix="corpus-"))
    for number, data in enumerate(target.seeds()):
        (corpus / str(number)).write_bytes(data)
    outcome(target, target.seeds()[0], scratch)
    atheris.instrument_all()

    def one(data: bytes) -> None:
        for left in scratch.iterdir():
            left.unlink()
        outcome(target, data, scratch)

    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", "-rss_limit_mb=6000", str(corpus)], one)
    atheris.Fuzz()


def add_figures(found: dict[str, dict[str, Any]]) -> None:
    """Put the campaign behind the earlier ones."""
    earlier = json.loads(FIGURES.read_text()) if FIGURES.exists() else {"campaigns": []}
    total = {name: sum(one[name] for one in found.values()) for name in ("cases", "read", "refused", "found")}
    earlier["campaigns"].append({"date": date.today().isoformat(), **total, "targets": found})
    FIGURES.write_text(json.dumps(earlier, indent=1) + "\n")


def main() -> int:
    """Run the campaign asked for; exit code 1 when something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="all by default")
    parser.add_argument("--cases", type=int, default=10_000, help="over all targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--guided", type=int, metavar="SECONDS", help="one target under atheris")
    parser.add_argument("--no-figures", action="store_true", help="do not add to docs/data/fuzz.json")
    options = parser.parse_args()
    chosen = [TARGETS[name] for name in options.targets] or list(TARGETS.values())
    if options.guided:
        guided(chosen[0], options.guided)
        return 0
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, _too_slow)
    guard, found = Guard(), {}
    weights = sum(target.weight for target in chosen)
    for target in chosen:
        found[target.name] = campaign(target, round(options.cases * target.weight / weights), options.seed, guard)
        print(target.name, json.dumps(found[target.name]), flush=True)
    if not options.no_figures:
        add_figures(found)
    return int(any(one["found"] for one in found.values()))


def _too_slow(*_: object) -> None:
    raise Trespass(f"more than {SECONDS_PER_CASE} seconds")


if __name__ == "__main__":
    raise SystemExit(main())
