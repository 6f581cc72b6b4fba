"""Every public object prints as one line, without an address."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankscope as rs
from rankscope._printing import LONGEST
from rankscope.masks import MASKS
from rankscope.monitor.alarms import ALARMS
from rankscope.remedies import REMEDIES
from rankscope.verbs import VERBS
from tests.flat_calls import flat

IDS = {"input_ids": torch.arange(24).reshape(4, 6) + 5}


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()


@pytest.fixture(scope="module")
def run() -> rs.Run:
    return rs.measure("init:tiny-bert", IDS)


@pytest.fixture(scope="module")
def gauge() -> rs.Gauge:
    return rs.Gauge(encoder(), torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(0)))


OBJECTS: dict[str, Callable[[rs.Run, rs.Gauge], Any]] = {
    "Model": lambda run, gauge: rs.load("init:tiny-bert"),
    "Model of a module": lambda run, gauge: rs.Model(encoder()),
    "Inputs": lambda run, gauge: rs.Inputs(torch.zeros(512, 512, dtype=torch.long)),
    "Inputs of texts": lambda run, gauge: rs.Inputs(["a long text " * 1000]),
    "Surgery": lambda run, gauge: rs.Surgery(skip=0, mlp="drop"),
    "Stream": lambda run, gauge: rs.Stream("tokens batch dim"),
    "Design": lambda run, gauge: rs.Design(depth=2, width=32, heads=2),
    "Run": lambda run, gauge: run,
    "Provenance": lambda run, gauge: run.provenance,
    "Curve": lambda run, gauge: run.curve("mu", "block.out"),
    "Comparison": lambda run, gauge: rs.compare(run, run),
    "DoctorReport": lambda run, gauge: rs.doctor(encoder(), torch.randn(2, 6, 16)),
    "SelfTest": lambda run, gauge: rs.selftest(),
    "operate": lambda run, gauge: rs.operate(encoder(), {"skip": 0}, inputs=torch.randn(2, 6, 16)),
    "Gauge": lambda run, gauge: gauge,
    "Reading": lambda run, gauge: gauge.step(0, loss=1.0),
    "metrics": lambda run, gauge: rs.METRICS,
    "a metric": lambda run, gauge: rs.METRICS["mu"],
    "masks": lambda run, gauge: MASKS,
    "a mask": lambda run, gauge: MASKS["causal"],
    "remedies": lambda run, gauge: REMEDIES,
    "a remedy": lambda run, gauge: REMEDIES["deepnorm"],
    "alarms": lambda run, gauge: ALARMS,
    "an alarm": lambda run, gauge: ALARMS["token_collapse"],
    "verbs": lambda run, gauge: VERBS,
    "a verb": lambda run, gauge: VERBS["measure"],
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_prints_as_one_line(name: str, run: rs.Run, gauge: rs.Gauge) -> None:
    printed = repr(OBJECTS[name](run, gauge))
    assert "\n" not in printed
    assert len(printed) <= LONGEST + 60, printed
    assert not re.search(r"0x[0-9a-f]{6}", printed), printed


def test_the_finding_of_a_doctor_prints_as_one_line() -> None:
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 24).eval()
    found = flat(rs.doctor, net, torch.randn(4, 6, 16)).findings
    assert found
    assert all("\n" not in repr(one) and len(repr(one)) <= LONGEST for one in found)


def test_text_is_printed_in_one_place() -> None:
    """What others wrote reaches a terminal through ``cli.streams``, which shows its control characters."""
    source = Path(rs.__file__).parent
    printing = re.compile(r"(?<![\w.`\"])print\(|typer\.echo\(|\bstd(?:out|err)\.write\(|(?<!\w)Console\(")
    found = {
        f"{path.relative_to(source).as_posix()}: {line.strip().partition('  #')[0]}"
        for path in source.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if printing.search(line) and ">>>" not in line and path.name != "streams.py"
    }
    assert found == {
        'cli/app.py: sys.stderr.write(f"error: {visible(sentence)}\\n")',
        "cli/panels.py: typer.echo(ctx.get_help())",
        'cli/processes.py: print(f"process {rank} of {world}: ", end="", file=sys.stderr, flush=True)',
        "verbs/doctor/run.py: with Progress(*columns, console=Console(stderr=True), transient=True) as bar:",
    }, "these print our own words, or show control characters themselves"
