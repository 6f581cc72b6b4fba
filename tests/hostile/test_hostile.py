"""Hostile networks, each against its own hand-cut twin: equal to 1e-6, or refused by name; nothing else."""

from __future__ import annotations

import pytest
import torch

from tests.hostile.case import ALL
from tests.hostile.harness import VERBS, Setting, assert_close, measure_declared, outcome
from tests.hostile.suite import CASES
from tests.hostile.twin import WHOLE


@pytest.mark.parametrize("name", CASES)
def test_the_twin_is_the_network(name: str) -> None:
    """Without this, a twin that is wrong by itself would prove nothing."""
    case = CASES[name]
    model, given = case.model(), case.given()
    assert_close(case.run(model, given), case.twin(model, given, WHOLE).output, 1e-10 + case.roundings)


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        pytest.param(name, verb, marks=() if verb in case.core else pytest.mark.slow)
        for name, case in CASES.items()
        for verb in VERBS
    ],
)
def test_equal_or_refused(name: str, verb: str) -> None:
    case = CASES[name]
    found = outcome(case, verb)
    assert found.kind == "equal" or verb not in case.equal, f"refused, and must be equal: {found.detail}"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.declared])
def test_right_with_the_declaration(name: str) -> None:
    case = CASES[name]
    measure_declared(Setting(case, case.model(), case.given()))


def test_the_suite_is_large_and_its_verbs_are_known() -> None:
    assert len(CASES) >= 40
    for case in CASES.values():
        assert case.equal <= ALL <= VERBS.keys(), case.name
    assert torch.get_default_dtype() == torch.float32
