"""Files of results that a stranger wrote, with checksums that agree: only errors of ours, and text that is harmless."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import rankscope as rs
from rankscope._files import read_regular
from rankscope.cli.app import app
from rankscope.errors import InputError, RankscopeError, ResultError
from rankscope.ext.sweeps.status import status_of
from rankscope.monitor import read_record
from rankscope.runs import storage
from rankscope.runs.run import load_run
from tests.ext.sweeps.folders import made, rows, task
from tests.runs.builders import make_run, profile, write_sealed
from tests.runs.test_storage import put_rows

SAVED = Path(__file__).parents[1] / "golden" / "saved"
NAMES = sorted(path.name for path in SAVED.iterdir() if path.is_dir())
TRICK = "\x1b]0;title\x07\x1b[31m\u202e\u200f\x9b"
ODD = [None, True, -5, 1e308, 10**200, "", TRICK, [], {}, [1, 2], {"a": 1}, "1" * 3000, 2**70]


def _places(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:6]) if isinstance(tree, list) else ()
    for name, item in items:
        yield from _places(item, (*place, name))


def edited(facts: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """The facts with one or two entries removed, renamed or replaced."""
    found = copy.deepcopy(facts)
    for _ in range(dice.choice((1, 1, 2))):
        *above, name = dice.choice([p for p in _places(found) if p and p[0] not in ("table", "schema", "seal")])
        tree = found
        for step in above:
            tree = tree[step]
        kind = dice.randrange(4)
        if kind < 2 and isinstance(tree, dict):
            value = tree.pop(name)
            if kind:
                tree[f"{name}x"] = value
        else:
            tree[name] = dice.choice(ODD)
    return found


def _views(home: Path, good: Path, scratch: Path) -> dict[str, Callable[[], str]]:
    return {
        "text": lambda: str(load_run(home)),
        "json": lambda: json.dumps(load_run(home).to_json(), allow_nan=False),
        "page": lambda: rs.report(home, scratch / "page.html").read_text(),
        "card": lambda: rs.load_run(home).card(),
        "comparison": lambda: str(rs.compare(good, home)),
    }


def try_edits(name: str, count: int, scratch: Path, seed: int = 0) -> None:
    """Edit a saved run so often and show it in every way; the fuzz campaign uses it, too."""
    dice = random.Random(f"{name} {seed}")
    home = scratch / "run"
    for _ in range(count):
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(SAVED / name, home)
        facts = edited(json.loads((home / "run.json").read_text()), dice)
        if dice.random() < 0.2:
            facts["kind"] = dice.choice(("measure", "ablate", "bound", "exact", "doctor", "nothing"))
        write_sealed(home / "run.json", facts)
        for view in _views(home, SAVED / name, scratch).values():
            with suppress(RankscopeError):  # refused in words; any other error ends the test
                assert not set(TRICK.replace("]0;title", "").replace("[31m", "")) & set(view())


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("-2")])
def test_an_edited_run_is_shown_or_refused(name: str, tmp_path: Path) -> None:
    try_edits(name, 1, tmp_path)


def test_an_edited_record_of_a_sweep_is_shown_or_refused(tmp_path: Path) -> None:
    dice, home = random.Random(5), tmp_path / "sweep"
    one = task(1)
    for _ in range(12):
        shutil.rmtree(home, ignore_errors=True)
        (path,) = (made(home, [(one, rows(one, {"mu": [1.0]}))]) / "rows").iterdir()
        table = pq.read_table(path)
        records = [json.dumps(edited(json.loads(table["record"][0].as_py()), dice)), None]
        pq.write_table(table.set_column(table.schema.get_field_index("record"), "record", pa.array(records)), path)
        reads: tuple[Callable[[], object], ...] = (
            lambda: rs.query(home, "SELECT * FROM tasks"),
            lambda: str(status_of(home)),
        )
        for read in reads:
            with suppress(RankscopeError):
                read()


def test_text_of_a_run_moves_no_cursor(tmp_path: Path) -> None:
    name = f"measure{TRICK}"
    run = make_run(profile({"relative_residual": [0.9, 0.5]}, stack=f"enc{TRICK}").table(), model=name)
    home = run.save(tmp_path / "run")
    facts = json.loads((home / "run.json").read_text())
    facts["provenance"]["command"] = ["rankscope", "measure", name]
    write_sealed(home / "run.json", facts)
    compared = CliRunner().invoke(app, ["compare", str(home), str(home)])
    assert compared.exit_code == 0, compared.output
    for shown in (compared.output, rs.load_run(home).card()):
        assert not set("\x07\u202e\u200f\x9b") & set(shown)
        assert "\x1b]" not in shown
        assert "u202e" in shown
    assert "\u202e" not in rs.report(home, tmp_path / "page.html").read_text()


@pytest.mark.parametrize("kind", ["pipe", "device", "loop"])
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    one = task(1)
    folder = made(tmp_path / "sweep", [(one, rows(one, {"mu": [1.0]}))])
    run = make_run(profile({"m": [0.1]}).table()).save(tmp_path / "run")
    (tmp_path / "gauge").mkdir()
    cases: list[tuple[Path, Callable[[], object]]] = [
        (folder / "tasks.parquet", lambda: status_of(folder)),
        (folder / "sweep.json", lambda: rs.sweep({"models": ["init:tiny-bert"], "verbs": ["measure"]}, folder)),
        (run / "run.json", lambda: load_run(run)),
        (next(run.glob("*.parquet")), lambda: load_run(run)),
        (tmp_path / "gauge" / "readings-00000.jsonl", lambda: read_record(tmp_path / "gauge")),
        (tmp_path / "plan.yaml", lambda: rs.sweep(tmp_path / "plan.yaml", tmp_path / "out", serial=True)),
    ]
    for path, read in cases:
        kept = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero" if kind == "device" else path.name)
        with pytest.raises((ResultError, InputError)):
            read()
        path.unlink()
        if kept is not None:
            path.write_bytes(kept)
        (tmp_path / "plan.yaml").touch()


def test_a_file_that_grows_is_not_read_further(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    assert read_regular(tmp_path / "x", 10) == b"0123456789"
    with pytest.raises(OSError, match="more than 9 bytes"):
        read_regular(tmp_path / "x", 9)


def test_few_bytes_that_stand_for_many_rows_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_run(profile({"relative_residual": [0.5]}).table()).save(tmp_path / "run")
    put_rows(home, load_run(home).table.take(pa.array([0] * 5000)))
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_, **__: pytest.fail("it was decoded"))
    for limit in ("LARGEST_TABLE", "LARGEST_DECODED"):
        with monkeypatch.context() as patched:
            patched.setattr(storage, limit, 100)
            with pytest.raises(ResultError, match="5,000 rows"):
                rs.report(home, tmp_path / "page.html")


def test_a_run_that_could_not_be_read_again_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LARGEST_TABLE", 2)
    with pytest.raises(ResultError, match="Choose fewer"):
        make_run(profile({"relative_residual": [0.5]}).table()).save(tmp_path)


@pytest.fixture
def as_anybody() -> Iterator[Path]:
    """A folder that everybody may enter, for a process without the rights of root, who could write everywhere."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        own = os.geteuid()
        if own == 0:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            os.seteuid(own)


def test_a_read_only_folder_is_read_and_its_writers_are_refused(as_anybody: Path) -> None:
    tmp_path = as_anybody
    home = make_run(profile({"m": [0.1]}).table()).save(tmp_path / "run")
    one = task(1)
    sweep = made(tmp_path / "sweep", [(one, rows(one, {"mu": [1.0]}))])
    for place in (home, sweep, *(path for path in sweep.rglob("*") if path.is_dir())):
        place.chmod(0o555)
    try:
        assert load_run(home).table.num_rows == 3
        assert rs.query(sweep, "SELECT count(*) AS n FROM rows").to_pylist() == [{"n": 2}]
        plan = {"models": ["init:tiny-bert"], "verbs": ["measure"]}
        for write in (lambda: load_run(home).save(home), lambda: rs.sweep(plan, sweep, serial=True)):
            with pytest.raises(ResultError):
                write()
    finally:
        for place in (home, sweep, *(path for path in sweep.rglob("*") if path.is_dir())):
            place.chmod(0o755)


def test_a_clock_set_back_changes_no_result(tmp_path: Path) -> None:
    home = make_run(profile({"m": [0.1, 0.2]}).table()).save(tmp_path / "run")
    one, other = task(1), task(2)
    sweep = made(tmp_path / "sweep", [(one, rows(one, {"mu": [1.0]})), (other, rows(other, {"mu": [2.0]}))])
    before = rs.query(sweep, "SELECT * FROM rows ORDER BY ALL").to_pylist()
    for path in (*home.iterdir(), *sweep.rglob("*")):
        os.utime(path, (0, 0))  # as if everything had been written in 1970, or the clock had been set back since
    assert load_run(home).table.num_rows == 6
    make_run(profile({"m": [0.3]}).table()).save(home)
    assert load_run(home).table.num_rows == 3
    assert rs.query(sweep, "SELECT * FROM rows ORDER BY ALL").to_pylist() == before
