"""Flip bits in every kind of file that rankscope writes, kill every writer at random moments, and edit saved runs.

::

    python scripts/disk_faults.py --flips 1000 --kills 50 --edits 500     # writes docs/data/disk_faults.json
    python scripts/disk_faults.py --edits 500                             # only these; other figures stay

An edited run, whose checksums agree, has to be shown without control characters or refused by an error of ours. A flip
is accepted if an error of ours names the file, or if the result is the same as before. Anything else ends the
script with an error. Checkpoints cost a measurement each; the others a read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

from tests.faults.flipping import KINDS, flips  # noqa: E402
from tests.faults.killing import WRITERS, kills  # noqa: E402
from tests.runs.test_untrusted_results import NAMES, try_edits  # noqa: E402

FIGURES = ROOT / "docs" / "data" / "disk_faults.json"
FINE = {"same", "refused", "killed", "finished", "shown or refused"}


def main() -> None:
    """Run what was asked for and write the figures."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--flips", type=int, default=0, help="Number of flips over all kinds of files.")
    words.add_argument("--kills", type=int, default=0, help="Number of kills of each writer.")
    words.add_argument("--edits", type=int, default=0, help="Number of edited runs, each shown in every way.")
    words.add_argument("--seed", type=int, default=0)
    asked = words.parse_args()
    found: dict[str, dict[str, dict[str, int]]] = {}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        if asked.kills:
            found["kills"] = {
                writer.name: dict(kills(writer, asked.kills, Path(scratch) / writer.name, asked.seed))
                for writer in WRITERS
            }
        if asked.flips:
            found["flips"] = {
                kind.name: dict(flips(kind, -(-asked.flips // len(KINDS)), Path(scratch) / kind.name, asked.seed))
                for kind in KINDS
            }
        if asked.edits:
            each = -(-asked.edits // len(NAMES))
            for name in NAMES:
                try_edits(name, each, Path(scratch) / "edits", asked.seed)
            found["edits"] = {name: {"shown or refused": each} for name in NAMES}
    print(json.dumps(found, indent=1))
    odd = {word for part in found.values() for counts in part.values() for word in counts} - FINE
    if odd:
        raise SystemExit(f"silently wrong, or not refused by an error of ours: {sorted(odd)}")
    facts = {"date": date.today().isoformat(), "seed": asked.seed, "seconds": round(time.perf_counter() - started)}
    figures = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    figures |= {part: {**facts, **counts} for part, counts in found.items()}
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
