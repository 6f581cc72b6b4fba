"""The folder of a sweep: what it keeps, and what it refuses to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import ResultError
from rankscope.ext.sweeps import folder as sweep_folder
from rankscope.ext.sweeps import status as sweep_status
from rankscope.ext.sweeps.folder import SweepFolder, rows_file
from rankscope.ext.sweeps.status import status_of
from rankscope.runs.plain_json import seal
from tests.ext.sweeps.folders import made, rows, task


def test_status_counts_what_is_there(tmp_path: Path) -> None:
    one, two = task(1), task(2, seed=1)
    course = {"relative_residual": [0.9, 0.8]}
    made(tmp_path, [(one, rows(one, course)), (two, rows(two, course))], {"broken": "no weights"}, missing=3)
    status = status_of(tmp_path)
    assert status.counts == {"done": 2, "failed": 1, "missing": 3}
    assert status.rows == 8
    assert status.seconds == 1.0
    assert not status.complete
    assert status.groups["one", "measure"] == {"done": 2, "failed": 0, "missing": 0}
    assert status.to_json()["failures"][0]["reason"] == "no weights"
    assert str(status).splitlines() == [
        "2 of 6 tasks done, 8 rows, 1 s of work, 1 failed, 3 not run yet.",
        "  failed: measure broken, variant full, seed 0: no weights",
    ]


def test_success_forgets_the_failure(tmp_path: Path) -> None:
    one = task(1)
    folder = made(tmp_path, [])
    folder.begin([one])
    folder.keep_failure(one, {"reason": "was"})
    assert folder.contents().failed == {one.key}
    folder.keep_rows(one, rows(one, {"mu": [1.0]}), {})
    assert folder.contents().failed == set()
    assert list((tmp_path / "failures").iterdir()) == []


def test_many_failures_are_not_all_printed(tmp_path: Path) -> None:
    made(tmp_path, [], {f"m{i}": "why" for i in range(sweep_status.MOST_SHOWN + 7)})
    assert str(status_of(tmp_path)).endswith("and 7 more")


@given(st.text(max_size=80))
def test_rows_stay_below_the_folder_whatever_the_model_is_called(name: str) -> None:
    path = rows_file("measure", name, "0" * 24)
    assert path.startswith("rows/verb=measure/model_key=")
    assert path.count("/") == 3
    assert "/../" not in path
    assert len(path.encode()) < 200


def test_models_with_like_names_do_not_share_a_folder() -> None:
    assert rows_file("measure", "a b", "0" * 24) != rows_file("measure", "a/b", "0" * 24)


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"{", b'{"key": 1, "task": {}}', b'{"key": "../../x", "task": {}}', b'{"key": "a"}']
)
def test_a_list_of_tasks_that_is_not_ours_is_refused(tmp_path: Path, line: bytes) -> None:
    for content in (line, seal(line)):
        (tmp_path / "expected.jsonl").write_bytes(content + b"\n")
        with pytest.raises(ResultError, match="line 1"):
            SweepFolder(tmp_path).expected()


@pytest.mark.parametrize("text", [b"", b"[]", b'{"schema": 2}', b"null", seal(b'{"schema": 2}')])
def test_a_record_that_is_not_ours_is_refused(tmp_path: Path, text: bytes) -> None:
    one = task(1)
    folder = made(tmp_path, [(one, rows(one, {"mu": [1.0]}))])
    folder.record_file(one.key).write_bytes(text)
    with pytest.raises(ResultError):
        status_of(tmp_path)


def test_a_huge_record_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = task(1)
    made(tmp_path, [(one, rows(one, {"mu": [1.0]}))])
    monkeypatch.setattr(sweep_folder, "LARGEST_RECORD", 10)
    with pytest.raises(ResultError, match="end is missing"):
        status_of(tmp_path)


def test_no_sweep_is_said(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="There is no sweep"):
        status_of(tmp_path)
