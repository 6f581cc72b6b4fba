"""A save is done or not done, whatever happens on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import rankscope as rs
from tests.faults.conftest import Warm
from tests.runs.builders import make_run, profile

LEAST_MOMENTS = 15
LAYERS, SEQUENCES = 1000, 3
MEASURE = ["measure", "init:tiny-bert", "--sequences", "1", "--tokens", "8", "--quiet"]


def saved(place: Path, name: str, value: float) -> Path:
    """A run of some size, all of whose values are equal: half of it would be seen."""
    table = profile({"stable_rank": [value] * LAYERS}, sequences=SEQUENCES).table()
    return Path(make_run(table, model=name, verdict=f"No collapse: {name}.").save(place))


def name_in(place: Path) -> str:
    """Which run a folder holds; raises if it is not whole."""
    run = rs.load_run(place)
    assert run.table.num_rows == LAYERS * SEQUENCES
    assert set(run.table["value"].to_pylist()) == {{"old": 0.25, "new": 0.75}[run.provenance.model]}
    return run.provenance.model


@pytest.mark.slow
def test_old_or_new_and_never_half(warm: Warm, tmp_path: Path) -> None:
    """SIGKILL before and behind each call to the system that a save makes, and between two halves of a file."""
    saved(tmp_path / "new", "new", 0.75)
    seen = []
    for moment in range(1, 200):
        place = tmp_path / f"run{moment}"
        saved(place, "old", 0.25)
        outcome = warm.run([], tmp_path, "killed_at", moment=moment, source=str(tmp_path / "new"), place=str(place))
        seen.append(name_in(place))
        if outcome.code == 0:
            break
        assert outcome.code == -signal.SIGKILL, outcome.err
    assert len(seen) > LEAST_MOMENTS
    turn = seen.index("new")
    assert 0 < turn < len(seen) - 1, "the moment of truth lies within the save"
    assert set(seen[turn:]) == {"new"}, "and there is one"
    saved(tmp_path / "run3", "old", 0.25)
    assert name_in(tmp_path / "run3") == "old"


def test_a_writer_and_a_reader_in_one_folder(warm: Warm, tmp_path: Path) -> None:
    """A process saves two different runs over each other, 60 times each, while another reads them."""
    one, other = saved(tmp_path / "a", "old", 0.25), saved(tmp_path / "b", "new", 0.75)
    place = saved(tmp_path / "run", "old", 0.25)
    writer = warm.start([], tmp_path, "save_in_turn", one=str(one), other=str(other), place=str(place), times=60)
    names = []
    until = time.monotonic() + 20
    while (not {"old", "new"} <= set(names) or len(names) < 100) and time.monotonic() < until:
        names.append(name_in(place))
    assert writer.wait().code == 0
    assert set(names) == {"old", "new"}
    assert name_in(place) == "new"
    assert len(list(place.glob("rows-*.parquet"))) == 1


def test_no_file_may_grow(warm: Warm, tmp_path: Path) -> None:
    """`measure --out` where no file may grow beyond 1,024 bytes (RLIMIT_FSIZE), over an older run."""
    place = saved(tmp_path / "run", "old", 0.25)
    # The logs of the process are files as well: its own output must stay below the limit.
    outcome = warm.run([*MEASURE, "--out", "run"], tmp_path, "small_files", limit=1024)
    assert outcome.explained, outcome
    assert "could not be written to run (File too large)" in outcome.err
    assert outcome.out.strip(), "what was measured is shown all the same"
    assert name_in(place) == "old"
    assert sorted(path.suffix for path in place.iterdir()) == [".json", ".parquet"]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 64 KiB; only root can make one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "rankscope-test", str(place)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("no right to mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk(warm: Warm, tmp_path: Path, full_disk: Path) -> None:
    """`measure --out` on a file system of 64 KiB that is full but for 4 KiB, over an older run."""
    place = saved(full_disk / "run", "old", 0.25)
    filler = full_disk / "filler"
    room = os.statvfs(full_disk)
    filler.write_bytes(bytes(room.f_bavail * room.f_frsize - 4096))
    outcome = warm.run([*MEASURE, "--out", str(place)], tmp_path)
    assert outcome.explained, outcome
    assert "No space left on device" in outcome.err
    assert name_in(place) == "old"
    filler.unlink()
    assert warm.run([*MEASURE, "--out", str(place)], tmp_path).code == 0
    assert rs.load_run(place).provenance.model == "init:tiny-bert"


def test_pages_replace_files_only(warm: Warm, tmp_path: Path) -> None:
    """`report -o` names a device, a link to a page, and a page that is there while no file may grow."""
    saved(tmp_path / "run", "old", 0.25)
    (tmp_path / "null").symlink_to(os.devnull)
    assert warm.run(["report", "run", "-o", "null"], tmp_path).code == 0
    assert Path(os.devnull).is_char_device()
    (tmp_path / "page.html").write_text("older page")
    (tmp_path / "link.html").symlink_to("page.html")
    refused = warm.run(["report", "run", "-o", "page.html"], tmp_path, "small_files", limit=4096)
    assert refused.explained, refused
    assert (tmp_path / "page.html").read_text() == "older page"
    assert warm.run(["report", "run", "-o", "link.html"], tmp_path).code == 0
    assert (tmp_path / "link.html").is_symlink()
    assert "<html" in (tmp_path / "page.html").read_text()
