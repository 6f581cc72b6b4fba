"""Write which versions the tests were run with, and what came of it, into the page on reliability.

``python scripts/write_versions.py oldest --tests REPORT.xml`` runs in the environment that was tested, takes the
versions from it and the outcome from the JUnit report of pytest, and writes ``docs/data/versions.json`` and
``docs/data/versions.inc`` (a table). Without arguments only the table is written. `.ci/versions` calls it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "versions.json"
TABLE = ROOT / "docs" / "data" / "versions.inc"
CORE = ("torch", "transformers", "safetensors", "numpy", "pyarrow", "typer", "rich", "tqdm", "jaxtyping")
EXTRAS = ("matplotlib", "pandas", "scipy", "jinja2", "torchmetrics", "lightning", "accelerate", "tensorboard")
EXTRAS += ("ray", "pydantic", "pyyaml", "duckdb", "gguf", "sentencepiece", "protobuf")
SETS = ("oldest", "newest")


def installed(name: str) -> str:
    """Version of a package, without the name of the build."""
    return importlib.metadata.version(name).partition("+")[0]


def outcome(reports: list[Path]) -> dict[str, Any]:
    """Which folders of tests were run (or the one file of a folder), how they came out, and the seconds of pytest.

    A test that a later report has again counts as it came out there.
    """
    results: dict[tuple[str, str], str] = {}
    seconds = 0.0
    for suites in (ElementTree.parse(report).getroot() for report in reports):
        for case in suites.iter("testcase"):
            marks = {mark.tag for mark in case}
            worst = "failed" if marks & {"failure", "error"} else "skipped" if "skipped" in marks else "passed"
            results[case.get("classname", ""), case.get("name", "")] = worst
        seconds += sum(float(suite.get("time", 0)) for suite in suites.iter("testsuite"))
    parts: defaultdict[str, set[str]] = defaultdict(set)
    for place, _ in results:
        folder, _, file = place.removeprefix("tests.").partition(".")
        parts[folder].add(file)
    named = [f"{folder}/{min(files)}" if len(files) == 1 else folder for folder, files in parts.items()]
    counted = Counter(results.values())
    counts = {word: counted[word] for word in ("passed", "skipped", "failed")}
    return {"parts": sorted(named), **counts, "seconds": round(seconds)}


def record(name: str, reports: list[Path]) -> dict[str, Any]:
    """One row of the matrix, from this environment and these reports."""
    return {
        "set": name,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        "versions": {package: installed(package) for package in (*CORE, *EXTRAS)},
        **outcome(reports),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Two Markdown tables: what came of each set, and its versions."""
    lines = [
        "| set | date | Python | tests of | passed | skipped | failed | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        counts = " | ".join(f"{row[word]:,}" for word in ("passed", "skipped", "failed", "seconds"))
        lines.append(f"| {row['set']} | {row['date']} | {row['python']} | {', '.join(row['parts'])} | {counts} |")
    lines += ["", f"| package | {' | '.join(row['set'] for row in rows)} |", "|---|" + "---|" * len(rows)]
    for package in (*CORE, *EXTRAS):
        lines.append(f"| {package} | {' | '.join(row['versions'][package] for row in rows)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write both files; 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", nargs="?", choices=SETS, help="which end of the range this environment is")
    parser.add_argument("--tests", type=Path, nargs="+", help="JUnit reports of the tests that were run in it")
    options = parser.parse_args()
    rows = {row["set"]: row for row in json.loads(DATA.read_text(encoding="utf-8"))} if DATA.is_file() else {}
    if options.set is not None:
        if options.tests is None:
            parser.error("the tests that were run are missing: --tests REPORT.xml")
        rows[options.set] = record(options.set, options.tests)
    ordered = [rows[name] for name in SETS if name in rows]
    DATA.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    TABLE.write_text(table(ordered), encoding="utf-8")
    return int(any(row["failed"] for row in ordered))


if __name__ == "__main__":
    raise SystemExit(main())
