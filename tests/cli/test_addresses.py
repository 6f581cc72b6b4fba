"""Results at an address: the same commands, whole files, and sentences where a store refuses."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.registry import _registry

import rankscope as rs
from rankscope.errors import InputError, RankscopeError, ResultError
from rankscope.ext.sweeps.results import Results
from rankscope.ext.sweeps.running import run_tasks
from rankscope.ext.sweeps.tasks import Task
from rankscope.ext.sweeps.working import Limits
from rankscope.runs.places import is_address, place_of
from tests.ext.sweeps.folders import rows, task
from tests.ext.sweeps.test_running import PLAN, counted, rows_in
from tests.s3_server import KEYS, PLAIN_KEYS, s3_server, why_not

EXPECTED = "a folder"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a bucket on a real S3 server."""
    why = why_not()
    if why is not None:
        pytest.skip(why)
    with s3_server(tmp_path_factory.mktemp("s3") / "server"):
        yield "s3://results"


@pytest.mark.parametrize("where", ["folder", "memory", "s3"])
def test_a_file_is_created_once_replaced_whole_and_listed(where: str, request: Any, tmp_path: Path) -> None:
    given = {"folder": str(tmp_path), "memory": f"memory://{tmp_path.name}"}.get(where)
    place = place_of(given or f"{request.getfixturevalue('store')}/files", "folder", EXPECTED)
    place.make("rows")
    assert place.create("sweep.json", b"one")
    assert not place.create("sweep.json", b"two")
    assert place.read("sweep.json", 10) == b"one"
    with pytest.raises(OSError, match="more than 2 bytes"):
        place.read("sweep.json", 2)
    place.write("rows/a", b"1")
    place.write("rows/a", b"2")
    assert place.names("rows") == {"a"}
    assert place.names("nothing") == set()
    assert (place.holds("rows/a"), place.holds("rows/b")) == (True, False)
    place.remove("rows/a")
    place.remove("rows/a")
    assert place.names("rows") == set()
    with pytest.raises(FileNotFoundError):
        place.read("rows/a", 10)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (Path("s3://bucket/x"), "Pass an address as text"),
        ("weird://x", "Protocol not known: weird"),
        (5, "folder is an int; expected a folder"),
    ],
)
def test_what_is_no_place_is_refused(given: object, says: str) -> None:
    with pytest.raises(InputError, match=says):
        place_of(given, "folder", EXPECTED)


def test_a_missing_package_ends_in_the_command_that_installs_it(
    cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before anything is measured, and no folder is made of the address."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(json.dumps(PLAN))
    for words in (
        ["measure", "init:tiny-bert", "--out", "s3://bucket/x"],
        ["sweep", "plan.yaml", "--serial", "--out", "s3://bucket/x"],
        ["sweep", "status", "s3://bucket/x"],
        ["query", "s3://bucket/x", "SELECT 1"],
        ["compare", "s3://bucket/x", "s3://bucket/x"],
        ["report", "s3://bucket/x"],
    ):
        outcome = cli(*words)
        assert outcome.code == 2
        assert "pip install s3fs" in outcome.err
    assert os.listdir(tmp_path) == ["plan.yaml"]


def test_a_run_is_saved_read_and_replaced_at_an_address(store: str, cli: Any, tmp_path: Path) -> None:
    place = f"{store}/run"
    assert is_address(place)
    assert cli("measure", "init:tiny-bert", "--sequences", "1", "--tokens", "8", "--out", place).code == 0
    first = rs.load_run(place)
    assert first.source == place
    other = rs.measure("init:tiny-bert", rs.Inputs(sequences=1, tokens=9))
    assert other.save(place) == place
    assert rs.load_run(place).to_json() == other.to_json()
    assert len(place_of(place, "run", EXPECTED).names("")) == 2, "the older rows are gone"
    first.save(tmp_path / "local")
    assert cli("compare", str(tmp_path / "local"), place).code == 0
    assert cli("report", place, "--out", str(tmp_path / "page.html")).code == 0
    assert "init:tiny-bert" in (tmp_path / "page.html").read_text(encoding="utf-8")
    with pytest.raises(ResultError, match=r"There is no run in s3://results/none: run\.json is missing"):
        rs.load_run(f"{store}/none")


def test_a_sweep_at_an_address_is_that_of_a_folder(
    store: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed on the way and started again; read from another process by the same commands."""
    place = f"{store}/sweep"
    plan = {**PLAN, "verbs": PLAN["verbs"][:1]}
    rs.sweep(plan, tmp_path / "serial", serial=True)
    counted(monkeypatch, stop_after=3)
    with pytest.raises(KeyboardInterrupt):
        rs.sweep(plan, place, serial=True, chunk=2)
    monkeypatch.undo()
    shown = cli("sweep", "status", place)
    assert shown.code == 0
    assert "2 of 4 tasks done, 2 not run yet" in shown.out
    assert rs.sweep(plan, place, serial=True).complete
    assert rows_in(place) == rows_in(tmp_path / "serial")
    assert json.loads(cli("query", place, "SELECT count(DISTINCT task) AS n FROM rows", "--json").out)["rows"] == [
        {"n": 4}
    ]


def test_wrong_credentials_end_in_a_sentence(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {**PLAN, "models": PLAN["models"][:1], "verbs": PLAN["verbs"][:1]}
    place = f"{store}/refused"
    with monkeypatch.context() as wrong:
        wrong.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        for ask in (
            lambda: rs.sweep(plan, place, serial=True),
            lambda: rs.load_run(place),
            lambda: rs.query(place, ""),
        ):
            with pytest.raises(RankscopeError, match="access was refused; check the credentials"):
                ask()
        s3fs.S3FileSystem.clear_instance_cache()


def test_a_bucket_that_vanishes_on_the_way_ends_in_a_sentence(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored is gone with it; with a new bucket of that name the sweep starts again."""
    import s3fs

    admin = s3fs.S3FileSystem(key=KEYS["AWS_ACCESS_KEY_ID"], secret=KEYS["AWS_SECRET_ACCESS_KEY"])
    for name, value in PLAIN_KEYS.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    admin.mkdir("vanishing")
    vanishes = [True]

    def work(one: Task, models: Any) -> Any:
        if one.facts["number"] == 3 and vanishes:
            vanishes.clear()
            admin.rm("vanishing", recursive=True)
        return rows(one, {"mu": [1.0]}), {}

    tasks, place = [task(number) for number in range(5)], "s3://vanishing/out"
    # Amazon's server says that there is no such bucket, this one that access is denied.
    with pytest.raises(
        ResultError, match=r"could not be written to .* \((the bucket does not exist|access was refused)"
    ):
        run_tasks(tasks, Results.at(place), Limits(), serial=True, work=work)
    with pytest.raises(ResultError, match=r"There is no|cannot be read"):
        rs.query(place, "SELECT 1")
    admin.mkdir("vanishing")
    assert run_tasks(tasks, Results.at(place), Limits(), serial=True, work=work) == {"done": 5}
    s3fs.S3FileSystem.clear_instance_cache()
