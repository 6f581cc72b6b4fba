"""Doctor on every family at tiny size: bit-identical, and as the compatibility table says.

``RANKSCOPE_WRITE_TABLE=1`` writes the table anew (``./dev compatibility``); the documentation page is built from it.
"""

from __future__ import annotations

import os

import pytest
import torch

from rankscope.verbs.doctor.checks import DoctorReport
from rankscope.verbs.doctor.run import doctor
from tests.contracts.compatibility import OWN, commit, committed, row
from tests.families import without_relatives
from tests.tiny_presets import TINY_PRESETS

NOT_FOUND = {
    "tiny-squeezebert",  # calls its blocks' forward() directly: no hook sees them
    "tiny-xlm",  # one loop over lists of sub-layers, on a stream made inside the loop's own module
    "tiny-flaubert",
    "tiny-mra",  # without the kernel that it compiles for an accelerator, its attention returns zeros
}


def compare(name: str, report: DoctorReport) -> None:
    facts = row(report)
    if os.environ.get("RANKSCOPE_WRITE_TABLE"):
        commit(name, facts)
    assert facts == committed()[name]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", without_relatives(TINY_PRESETS))
def test_transformers_family(name: str) -> None:
    report = doctor(f"init:{name}")
    compare(name, report)
    if name in NOT_FOUND:
        assert (report["blocks"].status, report.stacks) == ("refused", ())
        assert any(
            words in report["blocks"].detail
            for words in ("Name the blocks yourself", "are never called themselves", "What was seen agrees with")
        )
        return
    assert report.passed, str(report)
    assert report["parity"].status == "pass"
    assert all(any(stack.skips) for stack in report.stacks)


@pytest.mark.parametrize("name", OWN)
def test_other_libraries(name: str) -> None:
    torch.manual_seed(0)
    build, inputs = OWN[name]
    report = doctor(build(), inputs())
    compare(name, report)
    assert report.trusted, str(report)
    assert report["parity"].status == "pass"


def test_at_least_as_many_families_as_promised() -> None:
    found = [name for name, facts in committed().items() if facts["checks"].get("parity") == "pass"]
    assert len([name for name in found if name.startswith("tiny-")]) >= 45
    assert set(committed()) == {*TINY_PRESETS, *OWN}
