from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rankscope.errors import InputError, ResultError
from rankscope.monitor import Alarm, LayerValue, Reading, read_record
from rankscope.monitor.outlets import RecordWriter
from rankscope.runs.plain_json import seal

NAN = math.nan


def reading(step: int, value: float = 0.5, *, alarm: bool = False) -> Reading:
    table = (
        LayerValue("relative_residual", "block.out", None, 0, value, value / 2, value * 2),
        LayerValue("relative_residual", "block.out", None, 1, NAN, NAN, NAN, "undefined"),
    )
    found = Alarm("token_collapse", "raised", step, None, 1, "Tokens collapse.", {"r": value}, "skip")
    return Reading(step, {"rankscope/x": value}, table, (found,) if alarm else (), ("token_collapse",), 0.25, 1e9)


def same(one: Reading, other: Reading) -> bool:
    return json.dumps(one.to_json()) == json.dumps(other.to_json())


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written = [reading(step, 0.1 * step, alarm=step == 2) for step in range(1, 4)]
    writer = RecordWriter(tmp_path, {"model": "Tiny"})
    for one in written:
        writer.write(one)
    record = read_record(tmp_path)
    assert len(record.readings) == 3
    assert all(same(one, other) for one, other in zip(record.readings, written, strict=True))
    assert record.facts["model"] == "Tiny"
    assert [alarm.step for alarm in record.alarms] == [2]
    assert [one.values("relative_residual")[0] for one in record.readings] == pytest.approx([0.1, 0.2, 0.3])
    writer.close()


def test_parquet_holds_the_same_numbers(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, {})
    for step in range(3):
        writer.write(reading(step))
    assert not list(tmp_path.glob("*.parquet"))
    writer.close()
    writer.close()
    table = pq.read_table(tmp_path / "readings-00000.parquet")
    assert table.num_rows == 6
    assert table["step"].to_pylist() == [0, 0, 1, 1, 2, 2]
    assert table["mean"].to_pylist()[0] == 0.5
    assert math.isnan(table["mean"].to_pylist()[1])
    assert table.schema == read_record(tmp_path).table().schema
    assert not list(tmp_path.glob("*.part"))


def test_every_cut_of_the_last_line_is_tolerated(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, {})
    for step in range(3):
        writer.write(reading(step))
    path = tmp_path / "readings-00000.jsonl"
    content = path.read_bytes()
    start = content.rindex(b"\n", 0, -1) + 1
    for cut in range(start, len(content)):
        path.write_bytes(content[:cut])
        record = read_record(tmp_path)
        whole = cut == len(content) - 1  # only the newline is missing
        assert [one.step for one in record.readings] == ([0, 1, 2] if whole else [0, 1])
        assert record.torn == (0 if whole or cut == start else 1)


def test_record_is_continued_behind_a_torn_line(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, {"session": 1})
    for step in range(3):
        writer.write(reading(step))
    path = tmp_path / "readings-00000.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    del writer  # its process was killed: nothing was closed, and its lock is gone
    later = RecordWriter(tmp_path, {"session": 2})
    later.write(reading(1, 0.9))
    later.write(reading(4))
    later.close()
    record = read_record(tmp_path)
    assert [one.step for one in record.readings] == [0, 1, 4]
    assert record.readings[1].scalars["rankscope/x"] == 0.9
    assert record.torn == 1
    assert record.facts["session"] == 2


def test_full_segment_is_followed_by_another(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, {}, segment_bytes=2000)
    for step in range(20):
        writer.write(reading(step))
    writer.close()
    segments = sorted(path.name for path in tmp_path.glob("*.jsonl"))
    assert len(segments) > 2
    assert len(list(tmp_path.glob("*.parquet"))) == len(segments)
    assert [one.step for one in read_record(tmp_path).readings] == list(range(20))


WRITES_AND_DIES = """
import os, signal, sys
from pathlib import Path
from rankscope.monitor.outlets import RecordWriter
from rankscope.runs.plain_json import sealed_json
from tests.monitor.test_recording import reading
writer = RecordWriter(Path(sys.argv[1]), {})
for step in range(50):
    writer.write(reading(step))
stream = (Path(sys.argv[1]) / "readings-00000.jsonl").open("ab", buffering=0)
stream.write(sealed_json(reading(50).to_json())[:60])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_process_loses_only_the_line_it_was_writing(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", WRITES_AND_DIES, str(tmp_path)], cwd=root, env=environment, check=False
    )
    assert done.returncode == -signal.SIGKILL
    record = read_record(tmp_path)
    assert [one.step for one in record.readings] == list(range(50))
    assert record.torn == 1


@pytest.mark.parametrize(
    "line",
    [
        "{1, 2]",
        '{"step": 1}',
        '{"rankscope_gauge": 99}',
        json.dumps({**reading(1).to_json(), "rows": [[1, 2]]}),
        json.dumps({**reading(1).to_json(), "step": "first"}),
        json.dumps({**reading(1).to_json(), "scalars": {"x": "much"}}),
        json.dumps({**reading(1).to_json(), "alarms": [{}]}),
    ],
)
def test_whole_line_that_is_not_ours_is_refused(tmp_path: Path, line: str) -> None:
    for content in (line.encode(), seal(line.encode())):
        (tmp_path / "readings-00000.jsonl").write_bytes(content + b"\n")
        with pytest.raises(ResultError):
            read_record(tmp_path)


def test_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "readings-x.jsonl").write_text("{}")
    with pytest.raises(ResultError, match="no record"):
        read_record(tmp_path)


def test_record_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="folder"):
        RecordWriter(tmp_path / "file", {})


def test_reading_a_record_needs_no_torch() -> None:
    code = "import sys; from rankscope.monitor import read_record; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
