"""Hostile networks, each against its own hand-cut twin: equal to 1e-6, or refused by name; nothing else."""

from __future__ import annotations

import copy
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
import torch

import rankscope as rs
from tests.hostile.case import ALL
from tests.hostile.harness import (
    EDITS,
    TOLERANCE,
    VERBS,
    Setting,
    assert_close,
    assert_residuals,
    edit_outcomes,
    fingerprint,
    measure_declared,
    names_a_part,
    outcome,
    same,
)
from tests.hostile.parts import ids
from tests.hostile.recent import ExitsByInput
from tests.hostile.suite import CASES
from tests.hostile.twin import WHOLE, Cut


@pytest.mark.parametrize("name", CASES)
def test_the_twin_is_the_network(name: str) -> None:
    """Without this, a twin that is wrong by itself would prove nothing."""
    case = CASES[name]
    model, given = case.model(), case.given()
    assert_close(case.run(model, given), case.twin(model, given, WHOLE).output, 1e-10 + case.roundings)


ORDINARY = {
    name: sorted(case.core)[number % len(case.core)]
    for number, (name, case) in enumerate(CASES.items())
    if case.core and number % 2 == 0
}
"""One verb of every other case: the ordinary suite also tries every edit on a third of them."""


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", CASES)
def test_every_edit_is_equal_or_refused(name: str) -> None:
    case = CASES[name]
    for edit, found in edit_outcomes(case).items():
        assert found.kind == "equal" or edit not in case.equal, f"{edit}: refused, and must be equal: {found.detail}"


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        pytest.param(name, verb, marks=() if verb == ORDINARY.get(name) else pytest.mark.slow)
        for name in CASES
        for verb in VERBS
        if verb not in EDITS
    ],
)
def test_equal_or_refused(name: str, verb: str) -> None:
    case = CASES[name]
    found = outcome(case, verb)
    assert found.kind == "equal" or verb not in case.equal, f"refused, and must be equal: {found.detail}"


FORMS = [name for name, case in CASES.items() if case.skips and {"skip0", "skip05"} <= case.equal]
OFTEN = {"alpha", "channel_gain", "highway", "in_place", "where", "cat_projection", "einsum_mix", "long_skips_by_cat"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in FORMS]
)
def test_every_form_of_skip_in_float32_and_with_one_sequence(name: str) -> None:
    """Gains whose product is one leave every bit of the output as it was, and all others are those of the twin."""
    case = replace(CASES[name], dtype=torch.float32, inputs=lambda: ids(1))
    setting = Setting(case, case.model(), case.given())
    bare = setting.run()
    with (
        rs.operate(setting.model, rs.Surgery(skip=2.0), inputs=setting.given),
        rs.operate(setting.model, rs.Surgery(skip=0.5)),
    ):
        assert torch.equal(setting.run(), bare)
    # The twin in float64 with the same weights is the reference: two float32 results differ by the errors of both.
    fine = Setting(replace(case, dtype=torch.float64), copy.deepcopy(setting.model).double(), setting.given)
    for gain in (0.0, 0.5):
        want, ours = fine.twin(Cut(skip=gain)).output, []
        for one in (fine, setting):
            with rs.operate(one.model, rs.Surgery(skip=gain, **one.options), inputs=one.given):
                ours.append(one.run())
        # Float32 loses what float64 loses, magnified by the ratio of their digits; some networks are ill-conditioned.
        lost = assert_close(ours[0], want, 1e-10)
        assert_close(ours[1], want, max(TOLERANCE + case.roundings, 4 * 2.0**29 * lost))
        assert (want - bare).abs().max() > 1e-4 * bare.abs().max(), "there was nothing to change"
    assert torch.equal(setting.run(), bare)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.declared])
def test_right_with_the_declaration(name: str) -> None:
    case = CASES[name]
    measure_declared(Setting(case, case.model(), case.given()))


@pytest.mark.parametrize("verb", ["doctor", "measure", "exact_whole", "ablate"])
@pytest.mark.parametrize("name", ["batch_norm", "dropout"])
def test_a_model_in_training_is_read_as_in_evaluation_and_left_in_training(name: str, verb: str) -> None:
    """Running statistics do not move, dropout does not fall, and some modules that are in evaluation stay there."""
    case = CASES[name]
    model, given = case.model().train(), case.given()
    model.blocks[1].eval()
    before = fingerprint(model)
    with nullcontext() if verb in case.equal else suppress(rs.RankscopeError):
        VERBS[verb](Setting(case, model, given))
    after = fingerprint(model)
    assert [key for key, value in before.items() if not same(value, after[key])] == []


@pytest.mark.parametrize("first", [0, 1])
def test_a_depth_that_depends_on_the_input_is_refused(first: int) -> None:
    """Whether the later sequence runs more blocks than the first one or fewer; one depth is read."""
    model, even, odd = ExitsByInput().double().eval(), ids(1), ids(1, seed=1)
    even[0, 0], odd[0, 0] = 2, 3
    both = torch.cat([even, odd] if first == 0 else [odd, even])
    with pytest.raises(rs.RankscopeError, match=r"blocks\.2"):
        rs.measure(model, rs.Inputs(both, batch=1), metrics=["relative_residual"])
    with pytest.raises(rs.RankscopeError, match=r"blocks\.2"):
        rs.measure(model, rs.Inputs(both, batch=1, axes="batch tokens"), metrics=["relative_residual"])
    run = rs.measure(model, rs.Inputs(even, axes="batch tokens"), metrics=["relative_residual"], sites=["block.out"])
    assert {row["layer"] for row in run.table.to_pylist()} == {0, 1}


@pytest.mark.parametrize(
    ("message", "is_named"),
    [
        ("block 2: no skip to scale", True),
        ("blocks.1.attention has a kernel of its own", True),
        ("blocks.* do not fit", True),
        ("Attention hides its keys", True),
        ("the argument ids is not clear", True),
        ("something went wrong", False),
        ("blockage 2", False),
    ],
)
def test_a_refusal_has_to_name_a_part(message: str, is_named: bool) -> None:
    assert names_a_part(message, CASES["plain"].model()) == is_named


def test_the_harness_sees_a_silent_difference() -> None:
    """An answer that is off by more than the tolerance, a missing block, NaN: each fails."""
    case = CASES["plain"]
    theirs = case.twin(case.model(), case.given(), WHOLE)
    right = {
        (layer, sequence): value
        for layer, row in enumerate(theirs.relative_residuals())
        for sequence, value in enumerate(row)
    }
    assert assert_residuals(right, theirs, case) == 0.0
    for wrong in ({**right, (1, 0): right[1, 0] * (1 + 3e-6)}, {**right, (1, 0): float("nan")}, {(0, 0): right[0, 0]}):
        with pytest.raises(AssertionError):
            assert_residuals(wrong, theirs, case)
    with pytest.raises(AssertionError):
        assert_close(theirs.output * (1 + 3e-6), theirs.output)


def test_the_suite_is_large_and_its_verbs_are_known() -> None:
    assert len(CASES) >= 40
    for case in CASES.values():
        assert case.equal <= ALL <= VERBS.keys(), case.name
    assert torch.get_default_dtype() == torch.float32
