"""``docs/adding.md`` followed as it is written: each file is put where the page says, in a copy of the package.

Nothing else is touched, so the copy shows that a metric, a reading or an alarm really is one file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.printed import blocks

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/adding.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    return re.split(r"^#+ ", PAGE.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def written(heading: str, named: str | None = None) -> tuple[str, str]:
    """The file that a section names, and the code that it says to write there."""
    (file, *_) = re.findall(r"`(src/rankscope/[\w/]+\.py)`", section(heading))
    if named is not None:
        file = file.replace("NAME", named)
    return file, blocks(section(heading), "python")[0].body


CASES = {
    "A metric": (
        "nuclear_rank",
        "from rankscope.testing import check_metric\n"
        "check_metric('nuclear_rank')\n"
        "import rankscope as rs\n"
        "run = rs.measure('init:tiny-bert', rs.Inputs(sequences=1, tokens=8), metrics=['nuclear_rank'])\n"
        "assert (run.curve('nuclear_rank', 'block.out').mean >= 1).all()\n",
    ),
    "A metric of queries and keys": (
        None,
        "import rankscope as rs\n"
        "run = rs.measure('init:tiny-bert', rs.Inputs(sequences=1, tokens=8), metrics=['query_key_ratio'])\n"
        "assert len(run.table) == 3 * 4\n",
    ),
    "An alarm": (
        None,
        "import torch, rankscope as rs\n"
        "x = torch.randn(2, 8, 16)\n"
        "layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)\n"
        "model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)\n"
        "with torch.no_grad():\n"
        "    for one in model.layers:\n"
        "        one.self_attn.in_proj_weight *= 1e4\n"
        "seen = []\n"
        "gauge = rs.Gauge(model, x, metrics=['query_key_bound'], alarms=['stretched_queries'], actions=[seen.append])\n"
        "gauge.step(0)\n"
        "assert {alarm.name for alarm in seen} == {'stretched_queries'}\n",
    ),
    "A finding of `doctor`": (
        None,
        "import torch, rankscope as rs\n"
        "from rankscope.examination import ROWS\n"
        "row = ROWS['only_first_token']\n"
        "for make, expected in ((row.bad, ['only_first_token']), (row.good, [])):\n"
        "    torch.manual_seed(0)\n"
        "    program = make()\n"
        "    found = rs.doctor(program.model, program.inputs, loss=program.loss, labels=program.labels).findings\n"
        "    assert [one.code for one in found if one.code == 'only_first_token'] == expected\n",
    ),
}


@pytest.mark.parametrize("heading", CASES)
def test_one_file_is_enough(heading: str, tmp_path: Path) -> None:
    name, use = CASES[heading]
    file, code = written(heading, name)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path / file
    assert not target.exists()
    target.write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run(
        [sys.executable, "-c", use], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
