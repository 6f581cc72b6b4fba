"""The scripts of ``reproductions/``: the same numbers as stored, with tiny models, on documented names alone."""

from __future__ import annotations

import ast
import importlib
import json
import math
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "reproductions"
SCRIPTS = sorted(path.stem for path in (FOLDER / "small").glob("*.json"))
BY_ITSELF = "dong2021_path_census"
"""The script that is started as its reader starts it; the others import nothing anew."""
RELATIVE, ROUNDING, ONE_ANSWER = 1e-3, 1e-6, 0.02
"""Tolerances: of a number; below this float32 resolves nothing; an accuracy may differ by an answer or two."""


def differences(found: Any, stored: Any, place: str = "") -> list[str]:
    """Places in two JSON values that differ."""
    if isinstance(stored, dict):
        if not isinstance(found, dict) or found.keys() != stored.keys():
            return [f"{place}: other keys"]
        return [words for key in stored for words in differences(found[key], stored[key], f"{place}/{key}")]
    if isinstance(stored, list):
        if not isinstance(found, list) or len(found) != len(stored):
            return [f"{place}: another length"]
        pairs = enumerate(zip(found, stored, strict=True))
        return [words for index, pair in pairs for words in differences(*pair, f"{place}/{index}")]
    if isinstance(stored, bool) or not isinstance(stored, (int, float)) or not isinstance(found, (int, float)):
        return [] if found == stored else [f"{place}: {found!r}, stored {stored!r}"]
    about_answers = any(word in place for word in ("accuracy", "frozen", "recomputed", "recalibrated", "network"))
    close = math.isclose(found, stored, rel_tol=RELATIVE, abs_tol=ONE_ANSWER if about_answers else ROUNDING)
    return [] if close else [f"{place}: {found!r}, stored {stored!r}"]


def test_every_script_has_its_numbers() -> None:
    named = {path.stem for path in FOLDER.glob("*.py")} - {"output", "training"}
    assert set(SCRIPTS) == named
    told = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"`python reproductions/{name}.py`" in told for name in SCRIPTS)


def run_here(script: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script in this process, where torch is imported already, on one thread."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    monkeypatch.syspath_prepend(script.parent)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
        for name in {"output", "training", *SCRIPTS} - before:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gives_the_stored_numbers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    script, words = FOLDER / f"{name}.py", ["--small", "--out", str(tmp_path)]
    if name == BY_ITSELF:
        done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    else:
        run_here(script, words, monkeypatch)
    assert (tmp_path / f"{name}.png").stat().st_size > 5_000
    found, stored = (json.loads((place / f"{name}.json").read_text()) for place in (tmp_path, FOLDER / "small"))
    assert differences(found, stored) == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_uses_documented_names_only(path: Path) -> None:
    told = (FOLDER.parent / "docs/stability.md").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rankscope"):
            assert f"| `{node.module}` |" in told, node.module
            offered = importlib.import_module(str(node.module)).__all__
            assert {name.name for name in node.names} <= set(offered)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rs":
            assert hasattr(importlib.import_module("rankscope"), node.attr), node.attr
