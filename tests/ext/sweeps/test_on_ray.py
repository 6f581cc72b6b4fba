"""On Ray: the same rows as in one process, also when a worker, a node and the driver are killed on the way.

Ray starts in a process of its own, so that its warnings and threads are not those of the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rankscope as rs
from tests.ext.sweeps.test_running import rows_in
from tests.s3_server import s3_server, why_not

ROOT = Path(__file__).parents[3]
SMALL: dict[str, Any] = {
    "models": ["init:tiny-bert", "init:tiny-gpt2"],
    "verbs": [{"measure": {"metrics": ["relative_residual"]}}],
    "inputs": {"sequences": 1, "tokens": 8},
}

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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", ["folder", "s3"])
def test_a_worker_a_node_and_the_driver_die_and_every_row_is_there_once(tmp_path: Path, where: str) -> None:
    if where == "folder":
        _hurt_and_compared(tmp_path, str(tmp_path / "out"))
    elif (why := why_not()) is not None:
        pytest.skip(why)
    else:
        with s3_server(tmp_path / "server"):
            _hurt_and_compared(tmp_path, "s3://results/out")


def _hurt_and_compared(home: Path, out: str) -> None:
    answer = told("hurt", home, out)
    print(answer["killed"], answer["second run"])
    assert answer["complete"]
    assert answer["code"] == 0
    assert len(answer["killed"]) == 3
    assert answer["before"] < 24, "the driver was killed before the end"
    twice = "SELECT task, metric, site, layer, sequence, count(*) AS n FROM rows GROUP BY ALL HAVING n > 1"
    assert rs.query(out, twice).num_rows == 0
    assert rs.query(out, "SELECT count(DISTINCT task) AS n FROM rows").to_pylist() == [{"n": 48}]
    rs.sweep({**SMALL, "seeds": list(range(24))}, home / "serial", serial=True)
    assert rows_in(out) == rows_in(home / "serial")


@pytest.mark.slow
def test_a_bad_task_costs_only_itself(tmp_path: Path) -> None:
    answer = told("poison", tmp_path, str(tmp_path / "out"))
    raised, ended = answer["bad"]
    assert (answer["counts"], answer["done"]) == ({"done": 30, "failed": 2}, 30)
    assert answer["failures"][raised] == "a fault of the plan"
    assert answer["failures"][ended].startswith("Its worker died 2 times.")
    assert answer["done again"] == 30
    assert answer["again"]["failed"] == 2, "a second run tries these two, and no others"


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
