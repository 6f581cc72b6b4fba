"""A plan is data from somebody else: whatever a string of it says, no code of anybody runs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.errors import RankscopeError
from rankscope.ext.sweeps.plan import Plan, plan_of
from rankscope.ext.sweeps.running import sweep

SEED = """
open({sentinel!r}, "w").close()
def build():
    raise SystemExit("code that a plan names was run")
"""
MODELS: tuple[dict[str, Any], ...] = (
    {"model": "init:tiny-bert"},
    {"name": "run", "checkpoints": [{}]},
    {"name": "run", "checkpoints": [{"path": "checkpoint"}]},
    {},
)
"""Entries of a plan into which a string is written; a string that excludes others finds a place in one of them."""
BASE = {"models": [MODELS[0]], "verbs": ["measure"], "inputs": {"sequences": 1, "tokens": 4}}

Place = tuple[str | int, ...]


def places_in(schema: dict[str, Any]) -> list[Place]:
    """Where a plan can hold a value, read from the schema that validates plans; 0 stands for any entry of a list."""

    def below(node: dict[str, Any], place: Place) -> Iterator[Place]:
        yield place
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        for kind in (*node.get("anyOf", ()), *node.get("oneOf", ())):
            verb = schema["$defs"][kind["$ref"].rpartition("/")[2]] if "$ref" in kind else {}
            name = verb.get("properties", {}).get("verb", {}).get("const")
            yield from below(kind, place if name is None else (*place, name))
        if isinstance(node.get("items"), dict):
            yield from below(node["items"], (*place, 0))
        for name, entry in node.get("properties", {}).items():
            yield from below(entry, (*place, name))

    return sorted(set(below(schema, ())), key=str)


PLACES = places_in(type(plan_of(BASE)).model_json_schema())


def plans_with(place: Place, text: str) -> Iterator[dict[str, Any]]:
    """Plans with a text at one place, one for each of the entries that it may stand in."""
    for entry in MODELS if "models" in place else MODELS[:1]:
        plan: Any = copy.deepcopy({**BASE, "models": [entry]})
        if place[:1] == ("variants",):
            plan["variants"] = [{"name": "one"}]
        if place[:2] == ("verbs", 0) and len(place) > 2:
            plan["verbs"] = [{place[2]: {}}]
        at = plan
        for step, following in itertools.pairwise(place):
            new: Any = [] if following == 0 else {}
            if isinstance(at, list):
                at.extend([new] if not at else [])
            elif not isinstance(at.get(step), type(new)):
                at[step] = new
            at = at[step]
        if isinstance(at, list):
            at[:] = [text]
        else:
            at[place[-1]] = text
        yield plan


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose code leaves a file when it is run; returns that file."""
    sentinel = tmp_path / "it ran"
    for name in ("evil.py", "evil_module.py"):
        (tmp_path / name).write_text(SEED.format(sentinel=str(sentinel)))
    (tmp_path / "evil.py:build").write_text("A file whose name is that of an object in another file.")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return sentinel


def outcome(plan: dict[str, Any], out: Path) -> str:
    """What becomes of a plan: the sentence that refuses it, or "ran"."""
    try:
        sweep({**plan, "retries": 0}, out, serial=True)
    except RankscopeError as error:
        return str(error)
    return "ran"


@pytest.mark.parametrize("place", [place for place in PLACES if place], ids=lambda place: ".".join(map(str, place)))
def test_no_string_of_a_plan_runs_code(place: Place, trap: Path, tmp_path: Path) -> None:
    """Every string of the schema, and every other place that somebody could write one at."""
    for text in ("evil.py:build", " evil_module:build[0]"):
        for number, plan in enumerate(plans_with(place, text)):
            outcome(plan, tmp_path / f"out{number}")
            assert not trap.exists(), f"{plan} ran the code it names"


@pytest.mark.parametrize(
    "place",
    [
        ("models", 0),
        ("models", 0, "model"),
        ("models", 0, "revisions", 0),
        ("models", 0, "checkpoints", 0),
        ("models", 0, "checkpoints", 0, "path"),
        ("models", 0, "checkpoints", 0, "revision"),
        ("inputs", "text"),
        ("inputs", "tokenizer"),
    ],
    ids=lambda place: ".".join(map(str, place)),
)
@pytest.mark.parametrize("text", ["evil.py:build", "os:getpid"])
def test_what_a_worker_would_open_is_refused_with_a_sentence(place: Place, text: str, tmp_path: Path) -> None:
    said = [outcome(plan, tmp_path / f"out{number}") for number, plan in enumerate(plans_with(place, text))]
    assert any(f"{text} runs code, which a plan cannot ask for" in one for one in said)


@pytest.mark.parametrize(
    "place",
    [("models", 0, "model"), ("models", 0, "checkpoints", 0, "path"), ("inputs", "text"), ("inputs", "tokenizer")],
    ids=lambda place: ".".join(map(str, place)),
)
def test_the_gate_of_named_code_holds_by_itself(
    place: Place, trap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place at which the plan itself forgets to look."""
    monkeypatch.setattr("rankscope.ext.sweeps.plan.is_named", lambda text: False)
    for number, plan in enumerate(plans_with(place, "evil.py:build")):
        outcome(plan, tmp_path / f"out{number}")
        assert not trap.exists(), f"{plan} ran the code it names"


def test_the_places_are_those_of_the_schema() -> None:
    """The first test would pass over a schema that it cannot read."""
    fields = set(Plan.model_fields)
    assert fields <= {place[0] for place in PLACES if len(place) == 1}
    assert {("models", 0, "checkpoints", 0, "path"), ("verbs", 0, "measure", "metrics", 0)} <= set(PLACES)
