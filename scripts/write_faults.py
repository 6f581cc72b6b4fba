"""Write the list of faults that the tests inject, and how each came out.

``python scripts/write_faults.py`` writes ``docs/data/faults.json`` and ``docs/data/faults.inc`` (a table) from the
declarations in ``tests/faults``; with ``--run`` the tests are run first, and what came out is written beside each.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "faults"
DATA = ROOT / "docs" / "data" / "faults.json"
ELSEWHERE = "::test_done_elsewhere"
"""Only looks whether another test is there, which says nothing of how that one comes out."""
TABLE = ROOT / "docs" / "data" / "faults.inc"


def declared() -> list[dict[str, str]]:
    """Every fault, in the order of the files and of their lines."""
    sys.path.insert(0, str(ROOT))
    from tests.faults.declaring import FAULTS

    for path in sorted(FOLDER.glob("test_*.py")):
        importlib.import_module(f"tests.faults.{path.stem}")
    return [vars(fault) for fault in sorted(FAULTS.values(), key=lambda fault: fault.test.partition("::")[0])]


def outcomes() -> dict[str, str]:
    """Run the tests: ``as expected``, ``failed`` or ``not run`` (with the reason) for each test function."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(FOLDER)]
        words += [f"--ignore={FOLDER / 'test_declared.py'}"]
        subprocess.run([sys.executable, *words], cwd=ROOT, check=False)
        cases = ElementTree.parse(report).iter("testcase")
        found: dict[str, str] = {}
        for case in cases:
            place = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '').partition('[')[0]}"
            found[place] = _worse(found.get(place, "as expected"), _outcome(case))
    return found


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    return "as expected" if skipped is None else f"not run: {skipped.get('message', '')}"


def _worse(one: str, other: str) -> str:
    return next((word for word in (one, other) if word == "failed"), one if one != "as expected" else other)


def table(faults: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = ["| fault | what is done | what comes of it |", "|---|---|---|"]
    for fault in faults:
        outcome = fault.get("outcome", "not run")
        result = fault["expected"] if outcome == "as expected" else f"expected: {fault['expected']} ({outcome})"
        lines.append(f"| {fault['name']} | {fault['done']} | {result} |".replace("||", "| |"))
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true", help="run the tests and write what came out")
    options = parser.parse_args()
    faults: list[dict[str, Any]] = list(declared())
    before = json.loads(DATA.read_text(encoding="utf-8")) if DATA.is_file() else []
    known = outcomes() if options.run else {fault["test"]: fault["outcome"] for fault in before if "outcome" in fault}
    for fault in faults:
        if fault["test"].endswith(ELSEWHERE):
            fault["outcome"] = "not run here: it has a test of its own"
        elif fault["test"] in known:
            fault["outcome"] = known[fault["test"]]
    DATA.write_text(json.dumps(faults, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    TABLE.write_text(table(faults), encoding="utf-8")
    counted = Counter(fault.get("outcome", "not run").partition(":")[0] for fault in faults)
    print(f"{len(faults)} faults:", ", ".join(f"{count} {outcome}" for outcome, count in counted.items()))
    return int(any(fault.get("outcome") == "failed" for fault in faults))


if __name__ == "__main__":
    raise SystemExit(main())
