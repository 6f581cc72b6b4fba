from __future__ import annotations

import json

import pytest

from rankscope.verbs.selftest.run import COLUMNS, PRINTED, SelfTest, as_printed, confusing_tokens, selftest


@pytest.fixture(scope="module")
def result() -> SelfTest:
    return selftest()


@pytest.mark.parametrize("kind", PRINTED)
@pytest.mark.parametrize("metric", COLUMNS)
def test_every_printed_digit(result: SelfTest, kind: str, metric: str) -> None:
    place = list(COLUMNS).index(metric)
    assert as_printed(result.values[kind][place], PRINTED[kind][place]) == PRINTED[kind][place]


def test_passes_and_prints_the_table(result: SelfTest) -> None:
    assert result.passed
    lines = str(result).splitlines()
    table = lines[4:14]
    assert len({len(line) for line in table}) == 1
    assert [line.split()[-3] for line in table[2:]] == list(PRINTED["token 0 scaled x1000 (sink)"])
    assert "Verdict: All 40 values agree" in lines[2]


def test_a_wrong_value_is_named(result: SelfTest) -> None:
    wrong = dict(result.values) | {"iid Gaussian": (0.99, *result.values["iid Gaussian"][1:])}
    broken = SelfTest(wrong)
    assert not broken.passed
    assert broken.differences == ("iid Gaussian: relative_composite_residual is 0.99, expected .997",)
    assert "expected .997" in str(broken)


def test_json_is_plain(result: SelfTest) -> None:
    data = json.loads(json.dumps(result.to_json()))
    assert data["passed"]
    assert len(data["rows"]) == 5
    assert set(data["rows"][0]) == {"tokens", *COLUMNS}


def test_tokens_are_what_they_are_called() -> None:
    kinds = confusing_tokens()
    gaussian, offset, sink, outlier, collapsed = kinds.values()
    assert (offset - gaussian).std(0).max() < 1e-14
    assert sink[0].norm() / gaussian[0].norm() == pytest.approx(1000)
    assert (outlier[:, 1:] == gaussian[:, 1:]).all()
    assert collapsed.std(0).max() < 2e-3 < collapsed.std()
