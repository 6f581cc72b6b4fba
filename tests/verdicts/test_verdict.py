"""The look-alikes are told apart, and the sentence names where and by what."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pyarrow as pa
import pytest

from rankscope._types import Status
from rankscope.runs.rows import STATUS_CODE, RowWriter
from rankscope.verdicts import State, Verdict, judge_rows
from rankscope.verdicts.classifying import headline
from tests.runs.builders import FLOOR32, SMOLLM2_RESIDUAL, SMOLLM2_TOKEN, confusion_table, profile


def judge(table, floor: float | None = None, null=None) -> Verdict:
    return judge_rows(table, null, floor_relative=floor)


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
    assert all(
        "not excluded: one huge token, one huge channel, few directions, copies of one token" in verdict.sentence
        for verdict in alone
    )


def _only(metric: str):
    import pyarrow.compute as pc

    return pc.field("metric") == metric


def test_smollm2_is_one_huge_token() -> None:
    """Blocks 12 to 24 read .99 and a rank of one because of a single token: neither healthy nor collapsed."""
    ranks = [40.0] * 12 + [1.1] * 13 + [30.0] * 5
    curves = {"relative_residual": SMOLLM2_RESIDUAL, "largest_token_share": SMOLLM2_TOKEN, "effective_rank": ranks}
    verdict = judge(profile(curves).table(), FLOOR32)
    assert verdict.code == "huge token"
    assert verdict.sentence.startswith("One of the tokens carries most of the energy, in blocks 12-24.")
    assert "Largest token share 0.97, after block 12 of 30." in verdict.sentence
    assert "no-first" in verdict.next_steps[0]
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
    assert "Also one huge channel in block 1." in verdict.sentence
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
    assert verdict.sentence.startswith(f"No collapse. Lowest relative residual: {last:g}, after block 5 of 6.")
    assert "not excluded: copies of one token." in verdict.sentence


def test_a_common_vector_that_grows_is_an_offset() -> None:
    curves = {"relative_residual": [0.82, 0.6, 0.46], "centred_effective_rank": [40.0] * 3}
    verdict = judge(profile(curves).table(), FLOOR32)
    assert verdict.code == "mean offset"
    assert "from block 2" in verdict.sentence or "in the last block (2)" in verdict.sentence
    assert "Lowest relative residual: 0.46, after block 2 of 3." in verdict.sentence


@pytest.mark.parametrize("curve", [{"centred_effective_rank": [9.0, 1.2]}, {"centred_energy_rank_99": [40.0, 3.0]}])
def test_few_directions(curve: dict[str, list[float]]) -> None:
    verdict = judge(profile({"relative_residual": [0.9, 0.9], **curve}).table(), FLOOR32)
    assert verdict.code == "few directions"
    assert "in the last block (1)" in verdict.sentence


def test_collapse_tells_start_worst_and_recovery() -> None:
    verdict = judge(profile({"relative_residual": [0.9, 0.5, 0.009, 0.002, 0.3, 0.6]}).table(), FLOOR32)
    assert verdict.code == "collapsed"
    for words in (
        "in blocks 2-3",
        "Relative residual 0.002 after block 3, 0.6 after block 5.",
    ):
        assert words in verdict.sentence
    assert "depends on your task" in verdict.details


def test_collapse_into_the_floor() -> None:
    """The published float32 plateau: 1.9e-7 from layer 3 on."""
    table = profile({"relative_residual": [0.9, 0.5, 0.005, 1.9e-7, 1.9e-7]}, floor_below=FLOOR32).table()
    verdict = judge(table, FLOOR32)
    assert verdict.code == "collapsed"
    assert "It reaches the float floor 4.8e-7 from block 3 on." in verdict.sentence


def test_at_the_floor_it_cannot_tell() -> None:
    curve = {"relative_residual": [0.9, 1.9e-7, 1.9e-7, 0.3]}
    verdict = judge(profile(curve, floor_below=FLOOR32).table(), FLOOR32)
    assert verdict.code == "floor"
    for words in ("At the float floor in blocks 1-2", "cannot be measured", "float64"):
        assert words in verdict.sentence


def test_the_same_values_in_float64_are_a_collapse() -> None:
    assert (
        judge(profile({"relative_residual": [0.9, 1.9e-7]}).table(), 4 * np.finfo(np.float64).eps).code == "collapsed"
    )


def test_only_the_status_of_a_value_puts_it_at_the_floor() -> None:
    """A value below the floor of the whole stream may be resolved in its own channels; the metric has looked."""
    curve = {"relative_residual": [0.9, 1.9e-7]}
    assert judge(profile(curve).table(), FLOOR32).code == "collapsed"
    assert judge(profile({"relative_residual": [0.9, 0.0]}).table()).code == "collapsed"


def test_cosine_alone_speaks_of_directions() -> None:
    """Whether tokens of one direction have one length, cosines cannot tell."""
    verdict = judge(profile({"mean_cosine": [0.1, 0.99999]}).table(), FLOOR32)
    assert verdict.code == "same direction"
    assert judge(profile({"mean_cosine": [0.1, 0.9]}).table(), FLOOR32).code == "healthy"


def test_stacks_are_judged_apart_and_the_gravest_counts() -> None:
    writer = profile({"relative_residual": [0.9, 0.8]}, stack="encoder")
    table = profile({"relative_residual": [0.9, 0.002]}, stack="decoder", writer=writer).table()
    verdict = judge(table, FLOOR32)
    assert verdict.code == "collapsed"
    assert verdict.sentence.index("Encoder: No collapse") < verdict.sentence.index("Decoder: Collapsed")
    assert {item["stack"] for item in verdict.evidence} == {"encoder", "decoder"}


def of_sequences(*values: float) -> pa.Table:
    """One layer; a relative residual per sequence."""
    writer = RowWriter()
    place = {"metric": "relative_residual", "site": "block.out", "stack": None, "layer": 0, "first_sequence": 0}
    statuses = np.full(len(values), STATUS_CODE[Status.OK])
    writer.add(values=np.array(values), statuses=statuses, head_axis=False, **place)
    return writer.table()


def test_a_few_collapsed_sequences_are_counted_and_not_averaged() -> None:
    verdict = judge(of_sequences(0.9, 0.002, 0.9, 0.004, 0.001, 0.8, 0.8, 0.7), FLOOR32)
    assert verdict.code == "collapsed"
    assert "Collapsed in 3 of 8 sequences, in block 0" in verdict.sentence
    assert "Relative residual 0.002, after block 0 of 1." in verdict.sentence, "the median of those"
    assert "The other 5 sequences: no collapse." in verdict.sentence
    first = verdict.evidence[0]
    assert (first["code"], first["value"], first["sequences"], first["of_sequences"]) == ("collapsed", 0.002, 3, 8)


def test_the_null_is_printed_beside_the_value() -> None:
    null = {"relative_residual": {"mean": 0.997, "sd": 0.001, "draws": 8}}
    assert (
        "(random tokens of the same shape: 0.997)"
        in judge(profile({"relative_residual": [0.8]}).table(), FLOOR32, null).details
    )


@pytest.mark.parametrize("curves", [{"relative_residual": [math.nan] * 3}, {"attention_entropy": [0.5] * 3}, {}])
def test_nothing_to_judge(curves: dict[str, list[float]]) -> None:
    verdict = judge(profile(curves).table(), FLOOR32)
    assert verdict.code == "unknown"
    assert verdict.sentence.startswith("No verdict")


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([1, 1, 5], State.HEALTHY),
        ([1, 5, 5], State.HUGE_TOKEN),
        ([1, 1, 11], State.COLLAPSED),
        ([1, 10, 11], State.COLLAPSED),
        ([0, 0, 5], State.HUGE_TOKEN),
        ([0], State.UNKNOWN),
    ],
)
def test_a_run_is_named_after_half_of_its_sequences_or_after_any_that_collapses(
    states: list[int], expected: State
) -> None:
    assert headline(np.array(states)) == expected


def test_next_steps_name_the_model() -> None:
    verdict = judge_rows(profile({"relative_residual": [0.9, 0.001]}).table(), model="init:gpt2")
    assert verdict.next_steps == ("rankscope ablate init:gpt2",)
    assert judge(profile({"relative_residual": [0.9, 0.8]}).table()).next_steps == ()


def test_a_steady_fall_is_collapsing_and_says_when() -> None:
    """0.8 halved per block: 0.05 after five blocks, and below 0.03 one block later."""
    verdict = judge(profile({"relative_residual": [0.8 / 2**block for block in range(5)]}).table(), FLOOR32)
    assert verdict.code == "collapsing"
    assert "factor of 0.50 per block" in verdict.details
    assert "nearly equal after block 5" in verdict.sentence


@pytest.mark.parametrize(
    "curve",
    [
        [1 / (1 + block) for block in range(12)],  # a common vector to which every block adds the same
        [0.4, 0.12, 0.4, 0.12, 0.11],  # not in every block
        [0.9, 0.85, 0.8, 0.7, 0.6],
    ],
)
def test_what_falls_otherwise_is_not(curve: list[float]) -> None:
    assert judge(profile({"relative_residual": curve}).table(), FLOOR32).code in {"mean offset", "healthy"}


def test_undefined_blocks_speak() -> None:
    verdict = judge(profile({"relative_residual": [0.9, math.nan, 0.8]}).table(), FLOOR32)
    assert verdict.code == "healthy"
    assert "Undefined in block 1." in verdict.sentence


def test_a_verdict_travels() -> None:
    verdict = judge(confusion_table("token"), FLOOR32)
    again = pickle.loads(pickle.dumps(verdict))
    assert (again.sentence, again.code, len(again.evidence)) == (verdict.sentence, verdict.code, len(verdict.evidence))
