"""Compare ``exact`` with mpmath on random small networks, and record what became of each.

Networks are drawn by seed from the grammar of ``tests/reference/grammar.py``; the criterion is in
``tests/exact_arithmetic/grammar.py``::

    python scripts/exact_grammar.py --networks 1000 --digits 3840    # about 20 minutes of one core
    python scripts/exact_grammar.py --first 17 --networks 1          # one network, printed

The counts and every network that is not right in every block are written to ``docs/data/exact_grammar.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import rankscope  # noqa: E402
from tests.exact_arithmetic.grammar import Compared, compared  # noqa: E402
from tests.reference.grammar import Network, draw_network  # noqa: E402

RECORD = ROOT / "docs" / "data" / "exact_grammar.json"
GRAVEST = ("wrong", "refused", "marked", "right")


def outcome(found: Compared) -> str:
    """The gravest of the blocks' outcomes."""
    return next(word for word in GRAVEST if word in found.outcomes)


def told(network: Network, found: Compared) -> dict[str, Any]:
    """One network in JSON: None is a residual smaller than the reference can show, or zero."""
    got = [value if abs(value) < float("inf") else str(value) for value in found.got]
    return {
        "outcome": outcome(found),
        "network": network.described(),
        "true": list(found.truth.exponents),
        "digits": found.truth.digits,
        "got": got,
        "statuses": list(found.statuses),
        "refusal": found.refusal.split("\n")[0],
    }


def main() -> None:
    """Compare and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--networks", type=int, default=1000)
    parser.add_argument("--digits", type=int, default=3840)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    others, started = [], time.perf_counter()
    for seed in range(asked.first, asked.first + asked.networks):
        network = draw_network(seed)
        found = compared(network, asked.digits)
        counts[outcome(found)] += 1
        blocks.update(found.outcomes)
        if outcome(found) != "right":
            others.append(told(network, found))
            print(json.dumps(others[-1]), flush=True)
    record = {
        "date": date.today().isoformat(),
        "version": rankscope.__version__,
        "first": asked.first,
        "networks": asked.networks,
        "most_digits": asked.digits,
        "by_network": dict(counts),
        "by_block": dict(blocks),
        "seconds": round(time.perf_counter() - started),
        "not_right": others,
    }
    print({name: record[name] for name in ("by_network", "by_block", "seconds")})
    if asked.networks >= 300:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
