"""Diagnose a repository that does not train, apply the change that doctor tried, and check that it trains.

    python examples/repair.py --out repaired

What a program needs of ``rankscope doctor --json`` is in ``docs/using_with_agents.md``. The repository is copied first;
``examples/broken`` stays as it is.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BROKEN = Path(__file__).parent / "broken"
ASK = ["doctor", "train.py:build", "--inputs", "train.py:batch[0]", "--labels", "train.py:batch[1]"]
LOSS = ["--loss", "torch.nn.functional:cross_entropy"]
SCHEMA = 1


def diagnose(folder: Path) -> dict[str, Any]:
    """What doctor says about the repository. Exit codes 0 and 1 are answers; 2 is an error, in words on stderr."""
    command = [sys.executable, "-m", "rankscope", *ASK, *LOSS, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    report = json.loads(done.stdout)
    if (report["kind"], report["schema"]) != ("doctor", SCHEMA):
        raise SystemExit(f"This program reads schema {SCHEMA} of doctor, and got {report['schema']}.")
    return dict(report)


def apply(edit: Mapping[str, str], folder: Path) -> None:
    """Replace the old text by the new, inside the one function that the edit names."""
    path = (folder / edit["file"]).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise SystemExit(f"{path} is outside the repository.")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    function = find(ast.parse("".join(lines)), edit["function"].split("."))
    begin, end = function.lineno - 1, function.end_lineno
    body = "".join(lines[begin:end])
    if edit["old"] not in body:
        raise SystemExit(f"{edit['old']!r} is not in {edit['function']}.")
    lines[begin:end] = [body.replace(edit["old"], edit["new"] or "pass")]
    path.write_text("".join(lines), encoding="utf-8")


def find(tree: ast.AST, names: list[str]) -> Any:
    """The definition with a qualified name, such as ``Classifier.forward``."""
    for name in names:
        tree = next(node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == name)
    return tree


def loss_of(folder: Path) -> float:
    """Train as the repository does, and read the loss that it prints."""
    done = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, check=True)
    return float(re.findall(r"loss (\S+)", done.stdout)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("repaired"), help="folder for the repaired copy")
    folder = parser.parse_args().out / "repository"
    shutil.copytree(BROKEN, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    before = loss_of(folder)

    report = diagnose(folder)
    while not report["passed"]:
        first = next(found for found in report["findings"] if found["kind"] == "fault")
        print(first["sentence"])
        if not first["edits"]:
            raise SystemExit(f"No change was tried. Hint: {first['change']}")
        for edit in first["edits"]:
            print(f"{edit['file']}, {edit['function']}: {edit['old']} -> {edit['new']}")
            apply(edit, folder)
        again = diagnose(folder)
        if again["codes"] == report["codes"]:
            raise SystemExit("The change made no difference.")
        report = again

    after = loss_of(folder)
    print(f"loss {before:.3f} before, {after:.3f} after")
    if not after < 0.1 < before:
        raise SystemExit("The repository does not train.")


if __name__ == "__main__":
    main()
