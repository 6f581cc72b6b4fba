"""Compaction: the same answers before, during and after, wherever it is interrupted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import rankscope as rs
from rankscope.errors import ResultError
from rankscope.ext.sweeps import compacting
from rankscope.ext.sweeps.folder import SweepFolder
from rankscope.ext.sweeps.packs import PACKS, packs_in
from rankscope.ext.sweeps.profiles import profiles_in
from rankscope.ext.sweeps.status import status_of
from rankscope.runs.locks import lock_file
from tests.ext.sweeps.folders import made, rows, task
from tests.runs.builders import write_sealed

COURSE = {"relative_residual": [0.9, 0.8, 0.7], "mu": [1.0, 2.0, 3.0], "a_metric": [0.1, 0.7, 0.2]}
OPERATIONS = (("os", "replace"), ("os", "fsync"), ("Path", "unlink"), ("pq", "write_table"))


class Killed(BaseException):
    """A process that ends here."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plain = [task(number, model=f"m{number % 3}", seed=number) for number in range(1, 7)]
    other = task(9, verb="ablate", variant=None)
    tables = [(one, rows(one, COURSE)) for one in plain]
    tables.append((other, rows(other, COURSE, variant="pure", mask="own")))
    made(tmp_path / "sweep", tables, {"broken": "no weights"}, missing=1)
    return tmp_path / "sweep"


def answers(folder: Path) -> dict[str, Any]:
    home = SweepFolder(folder)
    contents = home.contents()
    profiles = [
        (one.model, one.seeds, {place: line.mean.tobytes() for place, line in one.curves.items()}, dict(one.facts))
        for one in profiles_in(contents, home.expected())
    ]
    return {
        "rows": rs.query(folder, "SELECT * FROM rows ORDER BY ALL").to_pylist(),
        "tasks": rs.query(folder, "SELECT * FROM tasks ORDER BY task").to_pylist(),
        "status": status_of(folder).to_json(),
        "profiles": profiles,
        "records": {key: contents.record(key) for key in sorted(contents.done)},
    }


def loose(folder: Path) -> list[str]:
    return sorted(path.name for part in ("rows", "tasks") for path in (folder / part).rglob("*") if path.is_file())


def at_each_operation(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> Callable[[], int]:
    """Call ``act`` with the number of every operation on files, before it; returns what counts them."""
    count = [0]

    def before(real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            act(count[0])
            return real(*args, **kwargs)

        return watched

    homes = {"os": os, "Path": Path, "pq": pq}
    for home, name in OPERATIONS:
        monkeypatch.setattr(homes[home], name, before(getattr(homes[home], name)))
    return lambda: count[0]


def test_every_answer_is_the_same_and_the_small_files_are_gone(folder: Path) -> None:
    before = answers(folder)
    assert str(rs.compact(folder)) == "7 tasks compacted; 1 pack in the folder."
    assert loose(folder) == []
    assert answers(folder) == before
    assert str(rs.compact(folder)) == "0 tasks compacted; 1 pack in the folder."
    assert answers(folder) == before


def test_rows_are_sorted_by_metric_site_and_layer(folder: Path) -> None:
    rs.compact(folder)
    (pack,) = packs_in(folder)
    found = pq.read_table(pack.rows_file).select(["metric", "site", "layer"]).to_pylist()
    order = [tuple(row.values()) for row in found]
    assert order == sorted(order)
    assert len(order) == 7 * 18


@pytest.mark.parametrize("most", [20, 40, 10**6])
def test_packs_have_a_largest_size_and_small_ones_are_joined(folder: Path, most: int) -> None:
    before = answers(folder)
    rs.compact(folder, rows=most)
    sizes = [pack.rows for pack in packs_in(folder)]
    assert sum(sizes) == 7 * 18
    assert all(size < most + 18 for size in sizes)
    assert answers(folder) == before
    rs.compact(folder)
    assert [pack.rows for pack in packs_in(folder)] == [7 * 18]
    assert answers(folder) == before


@pytest.mark.slow
def test_killed_anywhere_nothing_is_lost_and_nothing_is_twice(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds: the first makes packs, the second joins them, so that packs are replaced too."""
    before = answers(folder)
    rs.compact(folder, rows=40)
    start = tmp_path / "start"
    shutil.copytree(folder, start)
    extra = task(2000, model="later")
    SweepFolder(start).keep_rows(extra, rows(extra, COURSE), {"state": "done", "seconds": 0.25})
    wanted = answers(start)
    assert wanted != before
    with monkeypatch.context() as patch:
        shutil.copytree(start, tmp_path / "count")
        total = at_each_operation(patch, lambda _: None)
        rs.compact(tmp_path / "count")
        operations = total()
    assert operations > 15
    for last in range(1, operations + 1):
        copy = tmp_path / f"killed-{last}"
        shutil.copytree(start, copy)

        def kill(number: int, last: int = last) -> None:
            if number >= last:  # a dead process does not clean up either
                raise Killed

        with monkeypatch.context() as patch:
            at_each_operation(patch, kill)
            with pytest.raises(Killed):
                rs.compact(copy)
        assert answers(copy) == wanted, last
        rs.compact(copy)
        assert answers(copy) == wanted, last
        assert loose(copy) == []
        assert len([path for path in (copy / PACKS).iterdir() if path.suffix != ""]) == 3
        shutil.rmtree(copy)


def test_readable_at_every_moment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = answers(folder)
    seen = []

    def look(number: int) -> None:
        with monkeypatch.context() as quiet:
            quiet.undo()
            seen.append(rs.query(folder, "SELECT count(*) AS n, count(DISTINCT task) AS t FROM rows").to_pylist())
            assert status_of(folder).counts["done"] == 7, number

    with monkeypatch.context() as patch:
        at_each_operation(patch, look)
        rs.compact(folder, rows=40)
    assert len(seen) > 15
    assert all(one == [{"n": 126, "t": 7}] for one in seen)
    assert answers(folder) == wanted


def test_a_reader_that_looked_before_the_compaction_looks_again(folder: Path) -> None:
    home = SweepFolder(folder)
    looks = []

    def reading(contents: Any) -> int:
        looks.append(len(contents.packs))
        if len(looks) == 1:
            rs.compact(folder)
        return sum(contents.record(key)["table"]["rows"] for key in contents.done)

    assert home.read(reading) == 7 * 18
    assert looks == [0, 1]


def test_a_file_that_does_not_fit_its_record_stays_where_it_is(folder: Path) -> None:
    victim = next((folder / "rows").rglob("*2.parquet"))
    victim.write_bytes(victim.read_bytes() + b"x")
    done = rs.compact(folder)
    assert done.tasks == 6
    assert list(done.left) == [f"{2:024x}"]
    assert "hash" in str(done)
    assert victim.exists()
    assert SweepFolder(folder).record_file(f"{2:024x}").exists()


def test_tasks_of_an_earlier_plan_are_kept_but_not_shown(folder: Path) -> None:
    rs.compact(folder)
    SweepFolder(folder).begin([task(1, model="m1", seed=1)])
    assert rs.query(folder, "SELECT DISTINCT task FROM rows").to_pylist() == [{"task": f"{1:024x}"}]
    assert status_of(folder).earlier == 6
    assert status_of(folder).rows == 18


def test_a_task_that_ran_again_after_compaction_counts_once(folder: Path) -> None:
    rs.compact(folder)
    wanted = answers(folder)
    one = task(1, model="m1", seed=1)
    SweepFolder(folder).keep_rows(one, rows(one, {"mu": [5.0]}), {"state": "done"})
    assert answers(folder) == wanted
    rs.compact(folder)
    assert loose(folder) == []
    assert answers(folder) == wanted


def test_two_compactions_at_once_are_refused(folder: Path) -> None:
    (folder / PACKS).mkdir()
    pid = os.fork()
    if pid == 0:  # locks belong to processes
        with lock_file(folder / PACKS / compacting.LOCK, "this test") as lock:
            assert lock.take()
            (folder / "ready").touch()
            while not (folder / "go").exists():
                pass
        os._exit(0)
    try:
        while not (folder / "ready").exists():
            pass
        with pytest.raises(ResultError, match="Another process"):
            rs.compact(folder)
    finally:
        (folder / "go").touch()
        os.waitpid(pid, 0)
    assert rs.compact(folder).tasks == 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda facts: facts.update(schema=2), "schema"),
        (lambda facts: facts.update(replaces=["../../x"]), "schema"),
        (lambda facts: facts.pop("rows"), "rows"),
        (lambda facts: facts["rows"].update(bytes=1), "bytes"),
        (lambda facts: facts.update(tasks=[1]), "manifest"),
    ],
)
def test_an_edited_manifest_is_refused(folder: Path, change: Callable[[Any], Any], words: str) -> None:
    rs.compact(folder)
    (pack,) = packs_in(folder)
    facts = json.loads(pack.manifest.read_text())
    change(facts)
    write_sealed(pack.manifest, facts)
    with pytest.raises(ResultError, match=words):
        status_of(folder)


def test_an_empty_folder_has_nothing_to_compact(tmp_path: Path) -> None:
    made(tmp_path / "sweep", [], missing=2)
    assert str(rs.compact(tmp_path / "sweep")) == "0 tasks compacted; 0 packs in the folder."
    with pytest.raises(ResultError, match="no sweep"):
        rs.compact(tmp_path)
