"""The look-alikes are told apart, and the sentence names where and by what."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from rankscope._types import Status
from rankscope.results.lookalikes import State, layer_states
from rankscope.results.rows import STATUS_CODE, RowWriter
from rankscope.results.verdict import judge
from tests.results.builders import FLOOR32, SMOLLM2_RESIDUAL, SMOLLM2_TOKEN, confusion_table, profile

EXPECTED = {
    "iid": "healthy",
    "offset": "mean offset",
    "token": "huge token",
    "channel": "huge channel",
    "collapsed": "collapsed",
}


@pytest.mark.parametrize("row", EXPECTED)
def test_the_five_kinds_of_tokens(row: str) -> None:
    verdict = judge(confusion_table(row), FLOOR32)
    assert verdict.code == EXPECTED[row]
    assert verdict.evidence


def test_no_one_part_of_the_battery_is_enough() -> None:
    """With the residual alone, three of the five rows read the same: the verdict says what it could not exclude."""
    alone = [
        judge(confusion_table(row).filter(_only("relative_residual")), FLOOR32) for row in ("iid", "token", "channel")
    ]
    assert {verdict.code for verdict in alone} == {"healthy"}
    assert all("not excluded: one huge token, one huge channel" in verdict.sentence for verdict in alone)


def _only(metric: str):
    import pyarrow.compute as pc

    return pc.field("metric") == metric


def test_smollm2_is_one_huge_token() -> None:
    """Blocks 12 to 24 read .99 and a rank of one because of a single token: neither healthy nor collapsed."""
    ranks = [40.0] * 12 + [1.1] * 13 + [30.0] * 5
    curves = {"relative_residual": SMOLLM2_RESIDUAL, "largest_token_share": SMOLLM2_TOKEN, "effective_rank": ranks}
    verdict = judge(profile(curves).table(), FLOOR32)
    assert verdict.code == "huge token"
    for words in ("One huge token", "blocks 12-24", "97%", "relative residual 0.990", "66% to 94%", "no-first"):
        assert words in verdict.sentence
    first = verdict.evidence[0]
    assert (first["metric"], first["layer"]) == ("largest_token_share", 12)
    assert first["value"] == pytest.approx(0.97, rel=1e-14)


def test_a_milder_state_in_other_blocks_is_told_as_well() -> None:
    curves = {
        "relative_residual": [0.8] * 4,
        "largest_token_share": [0.1, 0.3, 0.99, 0.99],
        "largest_channel_share": [0.1, 0.8, 0.9, 0.9],
    }
    verdict = judge(profile(curves).table(), FLOOR32)
    assert verdict.code == "huge token"
    assert "from block 2 on" in verdict.sentence
    assert "Also one huge channel in block 1 (largest channel share 0.800)" in verdict.sentence
    assert ("largest_channel_share", 1) in {(item["metric"], item["layer"]) for item in verdict.evidence}


@pytest.mark.parametrize(("first", "last"), [(0.95, 0.83), (0.89, 0.70), (0.97, 0.77)])
def test_trained_encoders_are_healthy(first: float, last: float) -> None:
    curves = {
        "relative_residual": np.linspace(first, last, 6).tolist(),
        "centred_effective_rank": [40.0] * 6,
        "largest_token_share": [0.02] * 6,
        "largest_channel_share": [0.05] * 6,
    }
    verdict = judge(profile(curves).table(), FLOOR32)
    assert verdict.code == "healthy"
    assert "block 5 (of 0-5)" in verdict.sentence
    assert f"{last:.0%}" in verdict.sentence
    assert "not excluded" not in verdict.sentence


def test_a_common_vector_that_grows_is_an_offset() -> None:
    curves = {"relative_residual": [0.82, 0.6, 0.46], "centred_effective_rank": [40.0] * 3}
    verdict = judge(profile(curves).table(), FLOOR32)
    assert verdict.code == "mean offset"
    assert "block 2" in verdict.sentence
    assert "79%" in verdict.sentence  # 1 - 0.46^2


def test_few_directions() -> None:
    verdict = judge(profile({"relative_residual": [0.9, 0.9], "centred_effective_rank": [9.0, 1.2]}).table(), FLOOR32)
    assert verdict.code == "narrow"


def test_collapse_tells_start_worst_and_recovery() -> None:
    verdict = judge(profile({"relative_residual": [0.9, 0.5, 0.009, 0.002, 0.3, 0.6]}).table(), FLOOR32)
    assert verdict.code == "collapsed"
    for words in ("in blocks 2-3", "at block 3 (of 0-5)", "0.2%", "spreads again to 60% at block 5", "harm"):
        assert words in verdict.sentence


def test_collapse_into_the_floor() -> None:
    """The published float32 plateau: 1.9e-7 from layer 3 on."""
    table = profile({"relative_residual": [0.9, 0.5, 0.005, 1.9e-7, 1.9e-7]}, floor_below=FLOOR32).table()
    verdict = judge(table, FLOOR32)
    assert verdict.code == "collapsed"
    assert "from block 3 on it meets the float floor 4.77e-07" in verdict.sentence


@pytest.mark.parametrize("marked", [True, False])
def test_at_the_floor_it_cannot_tell(marked: bool) -> None:
    """By the status of the value, or by its size when no status says so."""
    curve = {"relative_residual": [0.9, 1.9e-7, 1.9e-7, 0.3]}
    verdict = judge(profile(curve, floor_below=FLOOR32 if marked else 0.0).table(), FLOOR32)
    assert verdict.code == "floor"
    for words in ("cannot tell", "in blocks 1-2", "rounding noise", "float64"):
        assert words in verdict.sentence


def test_the_same_values_in_float64_are_a_collapse() -> None:
    assert (
        judge(profile({"relative_residual": [0.9, 1.9e-7]}).table(), 4 * np.finfo(np.float64).eps).code == "collapsed"
    )


def test_exact_zero_is_at_the_floor_even_when_none_is_known() -> None:
    assert judge(profile({"relative_residual": [0.9, 0.0]}).table(), None).code == "floor"


def test_cosine_stands_in_for_the_residual() -> None:
    assert judge(profile({"mean_cosine": [0.1, 0.99999]}).table(), FLOOR32).code == "collapsed"
    assert judge(profile({"mean_cosine": [0.1, 0.9]}).table(), FLOOR32).code == "mean offset"


def test_stacks_are_judged_apart_and_the_gravest_counts() -> None:
    writer = profile({"relative_residual": [0.9, 0.8]}, stack="encoder")
    table = profile({"relative_residual": [0.9, 0.002]}, stack="decoder", writer=writer).table()
    verdict = judge(table, FLOOR32)
    assert verdict.code == "collapsed"
    assert verdict.sentence.index("Encoder: No collapse") < verdict.sentence.index("Decoder: Collapsed")
    assert {item["stack"] for item in verdict.evidence} == {"encoder", "decoder"}


def test_a_few_collapsed_sequences_are_not_averaged_away() -> None:
    writer = RowWriter()
    values = np.array([0.9, 0.9, 0.9, 0.001])
    writer.add(
        metric="relative_residual",
        site="block.out",
        stack=None,
        layer=0,
        first_sequence=0,
        values=values,
        statuses=np.full(4, STATUS_CODE[Status.OK]),
        head_axis=False,
    )
    verdict = judge(writer.table(), FLOOR32)
    assert verdict.code == "healthy"
    assert "1 of 4 sequences collapse" in verdict.sentence


def test_the_null_is_printed_beside_the_value() -> None:
    null = {"relative_residual": {"mean": 0.997, "sd": 0.001, "draws": 8}}
    assert "same-shape random 0.997" in judge(profile({"relative_residual": [0.8]}).table(), FLOOR32, null).sentence


@pytest.mark.parametrize("curves", [{"relative_residual": [math.nan] * 3}, {"attention_entropy": [0.5] * 3}, {}])
def test_nothing_to_judge(curves: dict[str, list[float]]) -> None:
    verdict = judge(profile(curves).table(), FLOOR32)
    assert verdict.code == "unknown"
    assert verdict.sentence.startswith("No verdict")


@pytest.mark.parametrize(
    ("states", "expected"),
    [([1, 1, 6], State.HEALTHY), ([1, 6, 6], State.COLLAPSED), ([0, 0, 5], State.HUGE_TOKEN), ([0], State.UNKNOWN)],
)
def test_a_layer_has_the_gravest_state_half_of_its_sequences_reached(states: list[int], expected: State) -> None:
    assert layer_states(np.array([states])) == [expected]


def test_a_verdict_travels() -> None:
    verdict = judge(confusion_table("token"), FLOOR32)
    again = pickle.loads(pickle.dumps(verdict))
    assert (again.sentence, again.code, len(again.evidence)) == (verdict.sentence, verdict.code, len(verdict.evidence))
