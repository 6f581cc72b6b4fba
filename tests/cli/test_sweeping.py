"""``sweep``, its other words, and ``query``: what they hand over, print and leave with."""

from __future__ import annotations

import csv
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import rankscope
from rankscope.errors import InputError
from rankscope.ext.sweeps.example import EXAMPLE_PLAN
from rankscope.ext.sweeps.plan import plan_of
from rankscope.ext.sweeps.status import status_of
from rankscope.ext.sweeps.tasks import tasks_of
from tests.cli.test_commands import Fake
from tests.ext.sweeps.folders import made, rows, task

COURSE = {"mu": [1.0, float("nan")]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    one = task(1, model="a [b]")
    made(tmp_path / "sweep", [(one, rows(one, COURSE))])
    return tmp_path / "sweep"


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    made(tmp_path / "broken", [], {"bad": "no [weights]"}, missing=1)
    return tmp_path / "broken"


def test_every_option_is_handed_over(cli, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = Fake(status_of(folder))
    monkeypatch.setitem(vars(rankscope), "sweep", fake)
    outcome = cli("sweep", "plan.yaml", "--address", "auto", "--workers", "3", "--chunk", "7", "--out", "o", "--quiet")
    assert fake.given[0] == (Path("plan.yaml"), "o")
    assert fake.given[1] == {
        "serial": False,
        "address": "auto",
        "workers": 3,
        "shard": None,
        "progress": False,
        "chunk": 7,
    }
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    cli("sweep", "--no-ray", "dir.a/plan.yaml")
    assert fake.given[0] == (Path("dir.a/plan.yaml"), str(Path("dir.a/plan")))
    assert fake.given[1]["serial"] is True
    cli("sweep", "run", "plan")
    assert fake.given[0][1] == "plan.sweep", "a plan is never its own folder"


def test_failures_are_listed_and_leave_with_one(cli, broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(rankscope), "sweep", Fake(status_of(broken)))
    for words in (("sweep", "plan.yaml"), ("sweep", "plan.yaml", "--quiet"), ("sweep", "status", str(broken))):
        outcome = cli(*words)
        assert outcome.code == 1
        assert "no [weights]" in outcome.out
    answer = json.loads(cli("sweep", "status", str(broken), "--json").out)
    assert answer["counts"] == {"done": 0, "failed": 1, "missing": 1}


def test_status_of_what_is_not_finished_is_no_failure(cli, folder: Path) -> None:
    outcome = cli("sweep", "status", str(folder))
    assert outcome.code == 0
    assert "a [b]" in outcome.out
    assert "1 of 1 tasks done" in outcome.out


def test_the_example_is_a_plan_and_never_overwrites(cli, tmp_path: Path) -> None:
    assert cli("sweep", "example").out == EXAMPLE_PLAN
    place = tmp_path / "plan.yaml"
    assert cli("sweep", "example", "--out", str(place)).code == 0
    tasks = list(tasks_of(plan_of(place)))
    assert len(tasks) == 9
    outcome = cli("sweep", "example", "--out", str(place))
    assert outcome.code == 2
    assert "is not overwritten" in outcome.err
    listed = cli("sweep", str(place), "--dry-run").out.splitlines()
    assert [line.split()[0] for line in listed] == [task.key for task in tasks]
    assert len(json.loads(cli("sweep", str(place), "--dry-run", "--json").out)["tasks"]) == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.yaml"], "a dry run writes nothing"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sweep", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["sweep", "status", "nowhere"], "no sweep in nowhere"),
        (["query", "nowhere", "SELECT 1"], "no sweep in nowhere"),
        (["sweep", "stauts", "a"], "sweep status"),
    ],
)
def test_wrong_use_exits_with_two(cli, words: list[str], says: str) -> None:
    outcome = cli(*words)
    assert outcome.code == 2
    assert says in outcome.err


def test_answers_as_table_json_and_csv(cli, folder: Path) -> None:
    sql = "SELECT model, layer, value, checkpoint FROM rows WHERE sequence = 0 ORDER BY layer"
    shown = cli("query", str(folder), sql)
    assert "a [b]" in shown.out
    assert shown.err == ""
    answer = json.loads(cli("query", str(folder), sql, "--json").out, parse_constant=no_constants)
    assert answer["columns"] == ["model", "layer", "value", "checkpoint"]
    assert answer["rows"][0] == {"model": "a [b]", "layer": 0, "value": 1.0, "checkpoint": None}
    assert answer["rows"][1]["value"] is None
    table = list(csv.reader(StringIO(cli("query", str(folder), sql, "--csv").out)))
    assert table[:2] == [["model", "layer", "value", "checkpoint"], ["a [b]", "0", "1.0", ""]]


def no_constants(word: str) -> Any:
    raise AssertionError(f"bare {word} in JSON")


def test_few_and_many_rows(cli, folder: Path) -> None:
    none = cli("query", str(folder), "SELECT * FROM rows WHERE layer = 99")
    assert (none.code, none.out, none.err) == (0, "", "no rows\n")
    many = cli("query", str(folder), "SELECT * FROM range(300)")
    assert "100 more rows; --csv prints all" in many.err


TRICK = "\x1b]0;title\x07\x1b[31m\u202e\x9b"
ESCAPED = r"\u001b]0;title\u0007\u001b[31m\u202e\u009b"


@pytest.mark.parametrize("form", [[], ["--json"], ["--csv"]], ids=["table", "json", "csv"])
@pytest.mark.parametrize("sql", ["SELECT '{}' AS x", 'SELECT 1 AS "{}"'], ids=["cell", "column"])
def test_the_answer_to_a_query_moves_no_cursor(cli, folder: Path, sql: str, form: list[str]) -> None:
    outcome = cli("query", str(folder), sql.format(TRICK), *form)
    assert outcome.code == 0
    assert ESCAPED in "".join(outcome.out.split("\n"))
    assert not set(TRICK) & set("\x1b\x07\u202e\x9b") & set(outcome.out)
    if form == ["--json"]:
        assert TRICK in (answer := json.loads(outcome.out))["columns"] or answer["rows"] == [{"x": TRICK}]


def test_a_refused_query_moves_no_cursor(cli, folder: Path) -> None:
    refused = cli("query", str(folder), f"SELECT error('{TRICK}')")
    assert refused.code == 2
    assert ESCAPED in refused.err
    assert "\x1b" not in refused.err
    assert "\x1b" not in str(InputError(TRICK))


@pytest.mark.parametrize("form", [[], ["--json"], ["--csv"]], ids=["table", "json", "csv"])
def test_a_value_that_python_cannot_hold_ends_in_a_sentence(cli, folder: Path, form: list[str]) -> None:
    outcome = cli("query", str(folder), "SELECT 'infinity'::DATE", *form)
    assert outcome.code == 2
    assert "Cast it to VARCHAR" in outcome.err


def test_the_settings_of_a_query_name_no_folder_of_the_user(cli, folder: Path) -> None:
    settings = cli("query", str(folder), "SELECT value FROM duckdb_settings()", "--csv").out
    assert str(Path.home()) + "/" not in settings
