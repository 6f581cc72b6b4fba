"""One verdict on several axes."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from rankscope.verdicts import AXES, AxisFinding, Verdict, across_axes

TOKENS = Verdict("No collapse.", ({"metric": "relative_residual", "value": 0.6},), "healthy", ("rankscope a",))


def finding(axis: str, code: str) -> AxisFinding:
    return AxisFinding(axis, code, f"{axis} {code}.", ({"value": 0.5},), (f"rankscope {axis}",))


def test_without_findings_the_verdict_is_the_same() -> None:
    assert across_axes(TOKENS, []) is TOKENS


@pytest.mark.parametrize(
    ("found", "headline"),
    [
        ([("inputs", "healthy")], "No collapse.\ninputs healthy."),
        ([("inputs", "collapsed")], "Collapsed along inputs, not tokens.\ninputs collapsed.\nTokens: No collapse."),
        (
            [("inputs", "collapsed"), ("streams", "unknown")],
            "Collapsed along inputs, not tokens.\ninputs collapsed.\nTokens: No collapse.\nstreams unknown.",
        ),
        (
            [("experts", "healthy"), ("inputs", "floor"), ("streams", "collapsed")],
            "Collapsed along inputs and streams, not tokens or experts.\ninputs floor.\nstreams collapsed.\nTokens: No "
            "collapse.\nexperts healthy.",
        ),
        (
            [("inputs", "collapsed"), ("depth", "collapsed")],
            "Collapsed along inputs, not tokens.\ninputs collapsed.\nTokens: No collapse.\ndepth collapsed.",
        ),
    ],
)
def test_the_headline_names_what_collapsed_and_what_did_not(found: list[tuple[str, str]], headline: str) -> None:
    """What collapsed comes first; idle blocks are usual at initialisation and are not in the headline."""
    findings = [replace(finding(*pair), is_usual_at_first=pair[0] == "depth") for pair in found]
    verdict = across_axes(TOKENS, findings)
    assert verdict.sentence == headline
    assert verdict.code == "healthy"
    assert [entry["axis"] for entry in verdict.axes] == [axis for axis, _ in found]
    assert [item.get("axis") for item in verdict.evidence] == [None, *(axis for axis, _ in found)]
    assert verdict.next_steps[0] == "rankscope a"


def test_tokens_and_inputs() -> None:
    tokens = Verdict("Collapsed.", (), "collapsed")
    assert across_axes(tokens, [finding("inputs", "collapsed")]).sentence.startswith(
        "Collapsed along tokens and inputs."
    )
    assert across_axes(tokens, [finding("inputs", "healthy")]).sentence.startswith("Collapsed.\ninputs")


def test_a_verdict_with_axes_can_be_pickled() -> None:
    verdict = across_axes(TOKENS, [finding("inputs", "collapsed")])
    assert pickle.loads(pickle.dumps(verdict)) == verdict


def test_every_axis_has_a_meaning() -> None:
    assert set(AXES) == {"tokens", "inputs", "streams", "experts", "attention", "depth"}
