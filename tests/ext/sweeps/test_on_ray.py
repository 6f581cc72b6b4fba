"""On Ray and in shards: the same rows as in one process, also when workers, nodes and drivers are killed on the way.

Ray starts in a process of its own, so that its warnings and threads are not those of the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import rankscope as rs
from tests.ext.sweeps.ray_programs import SMALL, files_in, start_sweep, wait_for
from tests.ext.sweeps.test_running import rows_in
from tests.s3_server import s3_server, why_not

ROOT = Path(__file__).parents[3]
pytest.importorskip("ray")


def told(program: str, folder: Path, out: str) -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.ext.sweeps.ray_programs", program, str(folder), out]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


@pytest.mark.slow
def test_a_ray_of_its_own(tmp_path: Path) -> None:
    answer = told("local", tmp_path, str(tmp_path / "out"))
    assert answer["counts"] == {"done": 2, "failed": 2, "missing": 0}
    reasons = {failure["what"].split()[1].rstrip(","): failure["reason"] for failure in answer["failures"]}
    assert "the largest node has" in reasons["huge"], "a task that fits nowhere must not wait for ever"
    assert "nothing.*" in reasons["wrong"]
    assert "500 cores" in answer["refused"]
    assert answer["fits"] == [True, True]
    assert not answer["still up"]
    serial = tmp_path / "serial"
    reading = {"model": "init:tiny-gpt2", "inputs": {**SMALL["inputs"], "text": str(tmp_path / "text.txt")}}
    rs.sweep({**SMALL, "models": ["init:tiny-bert", reading]}, serial, serial=True)
    assert rows_in(serial) == rows_in(tmp_path / "out")


@pytest.fixture(params=["folder", "s3"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where results go: a folder, or a real S3 server."""
    if request.param == "folder":
        yield str(tmp_path / "out")
    elif (why := why_not()) is not None:
        pytest.skip(why)
    else:
        with s3_server(tmp_path / "server"):
            yield "s3://results/out"


def all_48_are_there_once(out: str, home: Path) -> None:
    twice = "SELECT task, metric, site, layer, sequence, count(*) AS n FROM rows GROUP BY ALL HAVING n > 1"
    assert rs.query(out, twice).num_rows == 0
    assert rs.query(out, "SELECT count(DISTINCT task) AS n FROM rows").to_pylist() == [{"n": 48}]
    rs.sweep({**SMALL, "seeds": list(range(24))}, home / "serial", serial=True)
    assert rows_in(out) == rows_in(home / "serial")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_worker_a_node_and_the_driver_die_and_every_row_is_there_once(tmp_path: Path, out: str) -> None:
    answer = told("hurt", tmp_path, out)
    print(answer["killed"], answer["second run"])
    assert answer["complete"]
    assert answer["code"] == 0
    assert len(answer["killed"]) == 3
    assert answer["before"] < 24, "the driver was killed before the end"
    all_48_are_there_once(out, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_of_four_shards_is_killed_and_the_others_finish_its_share(tmp_path: Path, out: str) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({**SMALL, "seeds": list(range(24))}))
    shards = [start_sweep(plan, out, "--chunk", "2", "--shard", f"{number}/4") for number in range(4)]
    wait_for(lambda: files_in(out) >= 3, shards[0])
    shards[2].kill()
    shards[2].wait()
    before = files_in(out)
    assert before < 24, "it was killed before the end"
    print(f"killed after {before} files")
    assert [shard.wait() for shard in shards] == [0, 0, -9, 0]
    all_48_are_there_once(out, tmp_path)


@pytest.mark.slow
def test_a_bad_task_costs_only_itself(tmp_path: Path) -> None:
    answer = told("poison", tmp_path, str(tmp_path / "out"))
    raised, ended, endless = answer["bad"]
    assert (answer["counts"], answer["done"]) == ({"done": 29, "failed": 3}, 29)
    assert answer["failures"][raised] == "a fault of the plan"
    assert answer["failures"][ended].startswith("Its worker died 2 times.")
    assert answer["failures"][endless] == "It took longer than 3 s, the timeout of the plan."
    assert answer["done again"] == 29
    assert answer["again"] == {"failed": 3}, "a second run tries these three, and no others"


@pytest.mark.slow
def test_an_address_where_nobody_answers(tmp_path: Path) -> None:
    code = (
        "import rankscope as rs\n"
        f"try:\n    rs.sweep({SMALL!r}, 'out', address='127.0.0.1:1')\n"
        "except rs.RankscopeError as error:\n    print(error)"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path)
    assert "could not be reached at 127.0.0.1:1" in done.stdout
    assert "--serial" in done.stdout
