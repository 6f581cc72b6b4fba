"""Damaged input: what was found once stays repaired, and a small campaign runs every time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.mutating import mutated
from tests.fuzz.target import Target, outcome
from tests.fuzz.targets import TARGETS

FINDINGS = Path(__file__).parent / "findings"
FOUND = sorted(path for path in FINDINGS.glob("*/*") if path.is_file())
CASES = 150


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_not_damaged_is_read(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    outcomes = []
    for number, data in enumerate(target.seeds()):
        (folder := tmp_path / str(number)).mkdir()
        outcomes.append(outcome(target, data, folder))
    assert "read" in outcomes


@pytest.mark.parametrize("file", FOUND, ids=lambda file: f"{file.parent.name}-{file.name}")
def test_what_was_found_is_refused_in_words(file: Path, tmp_path: Path) -> None:
    assert outcome(TARGETS[file.parent.name], file.read_bytes(), tmp_path) in ("read", "refused")


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TARGETS)
def test_damage_is_refused_in_words(name: str, tmp_path: Path) -> None:
    target, chance = TARGETS[name], random.Random(name)
    seen = set()
    for number in range(CASES):
        (folder := tmp_path / str(number)).mkdir()
        seen.add(outcome(target, mutated(target.seeds(), target.words, chance, target.structured), folder))
    assert "refused" in seen


def test_an_error_that_is_not_ours_is_a_finding(tmp_path: Path) -> None:
    def broken(data: bytes, folder: Path) -> None:
        raise KeyError("unexpected")

    with pytest.raises(KeyError):
        outcome(Target("broken", lambda: (b"",), broken), b"", tmp_path)
