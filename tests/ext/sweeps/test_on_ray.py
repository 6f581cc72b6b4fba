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
from tests.ext.sweeps.ray_programs import SMALL
from tests.ext.sweeps.test_running import content

ROOT = Path(__file__).parents[3]

pytest.importorskip("ray")


def told(program: str, folder: Path) -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.ext.sweeps.ray_programs", program, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


@pytest.mark.slow
def test_a_ray_of_its_own(tmp_path: Path) -> None:
    answer = told("local", tmp_path)
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
    assert content(serial) == content(tmp_path)


@pytest.mark.slow
def test_a_worker_a_node_and_the_driver_die_and_every_row_is_there_once(tmp_path: Path) -> None:
    answer = told("hurt", tmp_path)
    assert answer["complete"]
    assert answer["code"] == 0
    assert len(answer["killed"]) == 3
    total = answer["counts"]["done"]
    assert answer["before"] < total, "the driver was killed before the end"
    twice = "SELECT task, metric, site, layer, sequence, count(*) AS n FROM rows GROUP BY ALL HAVING n > 1"
    assert rs.query(tmp_path / "out", twice).num_rows == 0
    assert rs.query(tmp_path / "out", "SELECT count(DISTINCT task) AS n FROM rows").to_pylist() == [{"n": total}]
    rs.sweep({**SMALL, "seeds": list(range(30))}, tmp_path / "serial", serial=True)
    assert content(tmp_path / "out") == content(tmp_path / "serial")


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
