"""Do the tests bite? Change one thing in the source at a time, and see whether a test notices.

Mutants are made by cosmic-ray's operators; annotations and docstrings are left alone, since nothing evaluates them. A
sample is drawn from each package. A mutant is tried by the tests that run its line, as a coverage run has recorded
them, the quickest first; a line that runs on import, by the tests that run anything of its module. It is killed when
one fails or hangs; it survives when all pass, or when those of the first two minutes do. Survivors are written down to
be judged by a person in ``mutants.json``; what was judged before is kept, ``--again`` tries the survivors
anew after tests were added, and another ``--seed`` draws afresh, which alone says what the tests do to mutants that
nobody has looked at::

    pip install cosmic-ray
    ./dev coverage                                  # writes .coverage and .durations.xml: what runs a line, how long
    python -m scripts.mutants --each 40             # per package; hours on one core
    python -m scripts.mutants --each 5 metrics
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scripts.mutant_source import SOURCE, Finder, Mutant, mutants_of, mutated_source, place_of

ROOT = SOURCE.parents[1]
PACKAGES = ("linalg", "metrics", "theory", "masks", "exact_arithmetic", "paths", "pass_graph", "stream", "surgery")
SECONDS = 120
"""Of tests for one mutant; a test that takes this long beyond it hangs."""


class Covering:
    """Which tests run a line, from the data of a coverage run with contexts."""

    def __init__(self, place: Path, durations: Path, also: Sequence[str] = ()) -> None:
        from coverage import CoverageData

        data = CoverageData(str(place))
        data.read()
        self._lines = {
            _below_source(name): {line: tests_of(found) for line, found in data.contexts_by_lineno(name).items()}
            for name in data.measured_files()
        }
        self._seconds = seconds_of(durations)
        self._also = list(also)

    def of(self, path: Path, line: int) -> list[str]:
        """The tests to try, quickest first."""
        own = self._lines.get(_below_source(str(path)), {})
        tests = own.get(line) or set().union(*own.values(), set())
        return self._also + sorted(tests, key=lambda test: (self._seconds.get(test, SECONDS), test))


def seconds_of(durations: Path) -> dict[str, float]:
    """What each test took, from a report of pytest in JUnit's format."""
    seconds = {}
    for case in ElementTree.parse(durations).iter("testcase"):
        place = case.attrib["classname"].replace(".", "/")
        seconds[f"{place}.py::{case.attrib['name']}"] = float(case.attrib["time"])
    return seconds


def tests_of(contexts: list[str]) -> set[str]:
    """Tests named by contexts such as ``tests/x.py::test_y|run``; what ran on import has none."""
    return {test for test, _, when in (context.rpartition("|") for context in contexts) if when in ("run", "setup")}


def _below_source(name: str) -> str:
    return name.replace(os.sep, "/").rpartition("src/rankscope/")[2]


def tried(mutant: Mutant, covering: Covering) -> str:
    """``"killed"``, ``"timeout"``, ``"survived"``, ``"uncovered"``, or ``"none"`` where nothing changes or parses."""
    path, source = mutated_source(mutant)
    try:
        changed = ast.dump(ast.parse(source)) if source else ""
    except SyntaxError:
        changed = ""
    if changed in ("", ast.dump(ast.parse(path.read_text(encoding="utf-8")))):
        return "none"
    tests = covering.of(path, mutant.line)
    if not tests:
        return "uncovered"
    ended = _in_a_child(mutant.module, path, source, tests)
    return "timeout" if ended < 0 else "killed" if ended else "survived"


def refuse_false_kills(package: str, covering: Covering) -> None:
    """The tests must pass on source that is served the same way and not changed."""
    path = place_of(package) / "__init__.py"
    others = {test for file in place_of(package).rglob("*.py") for test in covering.of(file, 0)[:2]}
    module = ".".join(path.parent.relative_to(SOURCE.parent).parts)
    if _in_a_child(module, path, path.read_text(encoding="utf-8"), sorted(others)) != 0:
        raise SystemExit(f"Tests of {package} fail without any change: {sorted(others)}")


def _in_a_child(module: str, path: Path, source: str, tests: list[str]) -> int:
    """How the tests end in a forked process: 0 when all pass, -1 when it was killed for taking too long."""
    child = os.fork()
    if child == 0:
        os._exit(_test(module, path, source, tests))
    return _waited(child)


class OnTime:
    """Ends a session of pytest after :data:`SECONDS`, counted once its tests run."""

    def __init__(self) -> None:
        self.failed, self._until = False, 0.0

    def pytest_runtestloop(self, session: Any) -> None:
        """The clock starts when the tests are collected."""
        self._until = time.monotonic() + SECONDS

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test failed, in any of its phases."""
        self.failed |= report.failed

    def pytest_collectreport(self, report: Any) -> None:
        """A file of tests could not be read."""
        self.failed |= report.failed

    def pytest_runtest_protocol(self, item: Any) -> None:
        """No further test once time is up."""
        if time.monotonic() > self._until:
            item.session.shouldstop = "time is up"


def _test(module: str, path: Path, source: str, tests: list[str]) -> int:
    import pytest

    out = os.open(os.devnull, os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(ROOT)
    sys.meta_path.insert(0, Finder(module, path, source))
    watch = OnTime()
    loaded_before = "ignore::pytest.PytestAssertRewriteWarning"
    words = ["-x", "-q", "-W", loaded_before, "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    ended = pytest.main(words, plugins=[watch])
    return int(watch.failed or ended not in (pytest.ExitCode.OK, pytest.ExitCode.INTERRUPTED))


def _waited(child: int) -> int:
    """Exit code; -1 when it was killed for taking too long."""
    until = time.monotonic() + 3 * SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) & 0xFF
        time.sleep(0.2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def drawn_from(package: str, each: int, seed: int, facts: dict[str, Any]) -> list[Mutant]:
    """A sample of a package's mutants; the first of a longer one with the same seed."""
    every = mutants_of(package)
    facts.setdefault("possible", {})[package] = len(every)
    random.Random(f"{package}:{seed}").shuffle(every)
    return every[:each]


def summary(facts: dict[str, Any]) -> str:
    """Kill rate per package and of all that are no empty change."""
    counts: dict[str, Counter[str]] = {package: Counter() for package in (*PACKAGES, "all")}
    for one in facts["tried"]:
        for name in (one["package"], "all"):
            alive = one["outcome"] in ("survived", "uncovered")
            counts[name]["equivalent" if alive and one["judged"].startswith("equivalent") else one["outcome"]] += 1
    lines = []
    for name, found in counts.items():
        dead, alive = found["killed"] + found["timeout"], found["survived"] + found["uncovered"]
        rate = f"{dead / (dead + alive):.1%}" if dead + alive else "none tried"
        lines.append(f"{name:10} {dead:4} killed, {alive:3} survived, {found['equivalent']:3} equivalent: {rate}")
    return "\n".join(lines)


def main() -> None:
    """Draw, try, write down after each mutant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help=f"of {', '.join(PACKAGES)}; all by default")
    parser.add_argument("--each", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--map", type=Path, default=ROOT / ".coverage", help="data of a coverage run with contexts")
    parser.add_argument("--durations", type=Path, default=ROOT / ".durations.xml", help="what its tests took")
    parser.add_argument("--also", nargs="*", default=[], help="tests written since that run, tried before the others")
    parser.add_argument("--figures", type=Path, default=Path("mutants.json"))
    parser.add_argument("--again", action="store_true", help="try the survivors in the figures again, draw none")
    parser.add_argument("--summary", action="store_true", help="only print the rates of what was tried")
    options = parser.parse_args()
    facts = json.loads(options.figures.read_text()) if options.figures.exists() else {"tried": []}
    if options.summary:
        print(summary(facts))
        return
    import numpy  # noqa: F401 - imported once here, so that the forked children need not
    import pyarrow  # noqa: F401
    import torch  # noqa: F401
    import transformers.models.bert.modeling_bert
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401

    packages = tuple(options.packages) or PACKAGES
    covering = Covering(options.map, options.durations, options.also)
    for package in packages:
        refuse_false_kills(package, covering)
    fields = tuple(Mutant.__dataclass_fields__)
    known = {Mutant(**{name: one[name] for name in fields}): one for one in facts["tried"]}
    if options.again:
        drawn = [m for m, one in known.items() if one["outcome"] in ("survived", "uncovered") and m.package in packages]
    else:
        drawn = [m for package in packages for m in drawn_from(package, options.each, options.seed, facts)]
        drawn = [mutant for mutant in drawn if mutant not in known]
    random.Random(options.seed).shuffle(drawn)
    for mutant in drawn:
        outcome = tried(mutant, covering)
        if mutant not in known:
            known[mutant] = {**asdict(mutant), "seed": options.seed, "judged": ""}
            facts["tried"].append(known[mutant])
        known[mutant]["outcome"] = outcome
        known[mutant].setdefault("first", outcome)
        facts["date"] = date.today().isoformat()
        options.figures.write_text(json.dumps(facts, indent=1) + "\n")
        print(outcome, mutant, flush=True)
    print(summary(facts))


if __name__ == "__main__":
    main()
