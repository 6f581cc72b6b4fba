"""Feed damaged input to every reader of something a stranger wrote, and keep what none should do.

A finding is anything but a clean read or an error of ours in words: another exception, a crash of the process, a case
that takes longer than ten seconds, memory above the limit, a file changed outside the case's folder, a program or a
connection started. Findings are stored as ``tests/fuzz/findings/TARGET/HASH.bin`` and replayed by the tests ever
after::

    python scripts/fuzz.py --cases 1000000                    # over all targets, by their weights
    python scripts/fuzz.py --cases 20000 mask-npz condition   # over some
    python scripts/fuzz.py --guided 60 mask-words condition   # guided by coverage (atheris), so many seconds each
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.dont_write_bytecode = True
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "RUST_BACKTRACE": "0", "OMP_NUM_THREADS": "1"}

from tests.fuzz.mutating import mutated  # noqa: E402
from tests.fuzz.target import Target, outcome  # noqa: E402
from tests.fuzz.targets import TARGETS  # noqa: E402
from tests.fuzz.watching import Board, Guard, in_a_child, watched  # noqa: E402

FINDINGS = ROOT / "tests" / "fuzz" / "findings"
_SEEN: set[tuple[str, str]] = set()


def campaign(target: Target, cases: int, seed: int) -> dict[str, Any]:
    """So many cases of one target; findings are stored as they come, and a crash ends one case only."""
    board, started, first = Board(), time.perf_counter(), 0
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-"))
    while first < cases:
        death = in_a_child(board, lambda: try_cases(target, range(first, cases), seed, scratch, board))  # noqa: B023
        number, _, data = board.look()
        if death is not None and not data:
            raise SystemExit(f"{target.name}: {death} outside of any case")
        if death is None:
            break
        keep_finding(target, data, death)
        board.end("found")
        first = number + 1
    shutil.rmtree(scratch)
    counts = dict(zip(Board.OUTCOMES, board.counts, strict=True))
    return {"cases": cases, **counts, "seconds": round(time.perf_counter() - started, 1), "seed": seed}


def try_cases(target: Target, numbers: range, seed: int, scratch: Path, board: Board) -> None:
    """In the child: the seeds first, unwatched, for the imports they bring; then case by case."""
    seeds = target.seeds()
    for data in seeds:
        _emptied(scratch)
        outcome(target, data, scratch)
    guard = Guard()
    for number in numbers:
        chance = random.Random(f"{target.name}:{seed}:{number}")
        data = mutated(seeds, target.words, chance, target.structured)
        _emptied(scratch)
        board.begin(number, data)
        board.end(one_case(target, data, scratch, guard))


def one_case(target: Target, data: bytes, scratch: Path, guard: Guard) -> str:
    """``"read"``, ``"refused"`` or ``"found"``."""
    try:
        with watched(guard, scratch):
            return outcome(target, data, scratch)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - anything at all is a finding
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        keep_finding(target, data, f"{type(error).__name__} at {place}", f"{error!s:.200}")
        return "found"


def keep_finding(target: Target, data: bytes, place: str, words: str = "") -> None:
    """Store the case under its hash, one per place of failure and process."""
    if (target.name, place) in _SEEN:
        return
    _SEEN.add((target.name, place))
    folder = FINDINGS / target.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{hashlib.sha256(data).hexdigest()[:16]}.bin").write_bytes(data)
    print(f"FOUND {target.name}: {place}: {words}\n   {data[:160]!r}", flush=True)


def _emptied(scratch: Path) -> None:
    for left in scratch.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def guided(target: Target, seconds: int, seed: int) -> dict[str, Any]:
    """Coverage-guided cases of one target in a process of its own, until the time is up or something is found."""
    with tempfile.TemporaryDirectory(prefix="guided-") as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, data in enumerate(target.seeds()):
            (corpus / str(number)).write_bytes(data)
        command = [sys.executable, __file__, "--guide", target.name, f"-max_total_time={seconds}", f"-seed={seed}",
                   "-rss_limit_mb=6000", "-timeout=10", "-print_final_stats=1", "-max_len=4096",
                   f"-artifact_prefix={folder}/found-", str(corpus)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        found = sorted(Path(folder).glob("found-*"))
        for path in found:
            keep_finding(target, path.read_bytes(), path.name.split("-")[1], done.stderr[-600:])
        if done.returncode and not found:
            raise SystemExit(done.stderr[-2000:])
    tried = re.findall(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
    edges = re.findall(r"cov: (\d+)", done.stderr)
    return {"cases": int(tried[-1]), "edges": int(edges[-1]), "found": len(found), "seconds": seconds, "seed": seed}


def guide(target: Target, arguments: list[str]) -> None:
    """The process that libFuzzer drives; it never returns."""
    import atheris

    scratch = Path(tempfile.mkdtemp(prefix="fuzz-"))
    with atheris.instrument_imports(include=["rankscope"]):
        outcome(target, target.seeds()[0], scratch)

    def one(data: bytes) -> None:
        _emptied(scratch)
        outcome(target, data, scratch)

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def main() -> int:
    """Run the campaign asked for; exit code 1 when something was found."""
    if sys.argv[1:2] == ["--guide"]:
        guide(TARGETS[sys.argv[2]], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="all by default")
    parser.add_argument("--cases", type=int, default=10_000, help="over all targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--guided", type=int, metavar="SECONDS", help="under atheris, for so long each")
    options = parser.parse_args()
    chosen = [TARGETS[name] for name in options.targets] or list(TARGETS.values())
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    weights = sum(target.weight for target in chosen)
    found = {}
    for target in chosen:
        share = -(-round(options.cases * target.weight) // weights)
        found[target.name] = (
            guided(target, options.guided, options.seed) if options.guided
            else campaign(target, int(share), options.seed)
        )  # fmt: skip
        print(target.name, json.dumps(found[target.name]), flush=True)
    return int(any(one["found"] for one in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
