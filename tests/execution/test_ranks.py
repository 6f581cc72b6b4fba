"""Several real processes measure what one does: bit for bit, or within the rounding of another order of summation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope.models.loading.spreading import OLDEST_TORCH
from tests.execution.rank_program import CUT_UP, FAMILIES, SCENARIOS, VERBS
from tests.forked import run_program

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "tests/execution/rank_program.py"
ONLY_SLOW = ("data4", "dealt", "fsdp4", "folder", "tensor", "late", "ablated")
SPREAD = ("fsdp", "tensor", "folder", "failing", "late", "ablated2")
"""Scenarios in which a model is spread over ranks."""
UNIT = {"float32": 2.0**-24, "float64": 2.0**-53}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scenarios of the ordinary suite, run once; :func:`said` adds one of the slow tests when it is needed."""
    ordinary = [name for name in SCENARIOS if not name.startswith(ONLY_SLOW)]
    return run_program(PROGRAM, tmp_path_factory.mktemp("sharing"), scenarios=ordinary)


def said(runs: Path, name: str) -> list[dict[str, Any]]:
    """What each rank said; all of them ended well."""
    if name.startswith(SPREAD) and torch.__version__ < OLDEST_TORCH:
        pytest.skip(f"models are spread with torch {OLDEST_TORCH} or newer")
    if not (runs / name).exists():
        run_program(PROGRAM, runs, scenarios=[name])
    codes = json.loads((runs / name / "ended.json").read_text())["codes"]
    assert codes == [0] * len(codes)
    return [json.loads((runs / name / f"{rank}.json").read_text()) for rank in range(len(codes))]


def without_processes(run: dict[str, Any], parallel: str, world: int) -> dict[str, Any]:
    assert run["processes"] == {"count": world, "parallel": parallel}
    return {name: value for name, value in run.items() if name != "processes"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_batches_dealt_out_give_the_bits_of_one_process(runs: Path, family: str, world: int) -> None:
    one = said(runs, "alone")[0][family]
    for rank in said(runs, f"data{world}"):
        assert without_processes(rank[family], "data", world) == one


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_sample_of_many_inputs_is_that_of_one_process(runs: Path, world: int) -> None:
    one = said(runs, "alone")[0]["many"]
    for rank in said(runs, f"data{world}"):
        assert furthest(rank["many"], one) < 1e-9


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_weights_give_the_bits_of_one_process(runs: Path, family: str, world: int) -> None:
    one = said(runs, "alone")[0][family]
    for rank in said(runs, f"fsdp{world}"):
        for run in (rank[family], rank[f"{family} loaded"]):
            found = without_processes(run, "fsdp", world)
            assert found["rows"] == one["rows"]
            said_of_text = found["verdict"].removeprefix(one["verdict"])
            # Of a module in memory, which has no tokenizer.
            assert said_of_text.lstrip().startswith("No tokenizer")
            assert {**found, "provenance": None} == {**one, "provenance": None, "verdict": found["verdict"]}
            different = {k for k, v in one["provenance"].items() if found["provenance"][k] != v}
            assert different == set()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sharded_module_is_left_sharded_and_as_it_was(runs: Path, world: int) -> None:
    for rank in said(runs, f"fsdp{world}"):
        for family in FAMILIES:
            assert rank[f"{family} after"] == {"same": True, "kinds": ["DTensor"]}


def test_model_loaded_in_parts_is_sharded_block_by_block(runs: Path) -> None:
    lists = {"tiny-llama": "layers", "tiny-gpt2": "h", "tiny-bert": "encoder.layer"}
    for family, name in lists.items():
        sharded = said(runs, "fsdp2")[0][f"{family} sharded"]
        assert {f"{name}.{number}" for number in range(3)} <= set(sharded)


def furthest(found: dict[str, Any], one: dict[str, Any]) -> float:
    """The largest difference of two runs that differ in nothing but values, on the scale of one or of the value.

    The battery consists of shares, cosines and ranks. Where one of them is small, it is the difference of larger ones
    or, a least singular value, stands beside a largest one: its rounding is that of the larger.
    """
    for got, want in zip(found["rows"], one["rows"], strict=True):
        assert {**got, "value": 0} == {**want, "value": 0}
    return max(
        abs(got["value"] - want["value"]) / max(1.0, abs(want["value"]))
        for got, want in zip(found["rows"], one["rows"], strict=True)
    )


def rounding(terms: int, dtype: str) -> float:
    r"""What another order of summation may change: a sum of n terms is off by at most :math:`n u / (1 - n u)`.

    Twice, once for each order. The terms are those of all products that are split, one behind the other: heads x size
    and hidden units in each block. That model and metric carry a difference on no larger than it came is no theorem;
    these do with room to spare (measured: at most a seventh of this).
    """
    unit = terms * UNIT[dtype]
    return 2 * unit / (1 - unit)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", CUT_UP)
def test_split_products_give_the_values_of_one_process(runs: Path, family: str, dtype: str) -> None:
    name = family if dtype == "float32" else f"{family} float64"
    one = said(runs, "alone")[0][name]
    ranks = said(runs, "tensor2")
    assert ranks[0][name]["rows"] == ranks[1][name]["rows"]
    found = without_processes(ranks[0][name], "tensor", 2)
    assert found["verdict"] == one["verdict"]
    assert found["provenance"] == one["provenance"]
    assert {row.get("head") for row in found["rows"]} == {None, 0, 1, 2, 3}
    assert furthest(found, one) <= rounding(3 * (4 * 8 + 64), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["local", "distributed"])
def test_module_split_by_hand_shows_every_head_once(runs: Path, activations: str) -> None:
    one = said(runs, "alone")[0]["own"]
    for rank in said(runs, "tensor2"):
        found = without_processes(rank[f"own {activations}"], "tensor", 2)
        assert {row.get("head") for row in found["rows"]} == {None, 0, 1, 2, 3}
        assert furthest(found, one) <= rounding(2 * (16 + 32), "float64")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_folder_read_in_parts_is_the_folder_read_whole(runs: Path, world: int) -> None:
    for rank in said(runs, f"folder{world}"):
        assert rank["data"]["rows"] == rank["fsdp"]["rows"] == rank["alone"]["rows"]
        assert furthest(rank["tensor"], rank["alone"]) <= rounding(2 * (4 * 8 + 64), "float32")
        assert rank["tensor"]["provenance"] == rank["alone"]["provenance"]


@pytest.mark.slow
def test_networks_taken_apart_are_those_of_one_process(runs: Path) -> None:
    one = said(runs, "ablated")[0]["None"]
    for rank in said(runs, "ablated2"):
        for way in ("data", "fsdp"):
            assert without_processes(rank[way], way, 2) == one
        assert furthest(rank["tensor"], one) <= rounding(3 * (4 * 8 + 64), "float32")
        assert "random copy of a sharded model" in rank["twin"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_deals_out_its_batches(runs: Path, verb: str, world: int) -> None:
    (one,) = said(runs, "dealt1")
    for found in said(runs, f"dealt{world}"):
        assert without_processes(found[verb], "data", world) == one[verb]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["exact", "bound", "decompose", "remedy"])
def test_verbs_that_need_whole_weights_say_so(runs: Path, verb: str) -> None:
    for found in said(runs, "dealt2"):
        for how, way in (("asked", "fsdp"), ("found", "fsdp"), ("cut", "tensor")):
            error = found[f"{verb}, {how}"]
            assert error["kind"] == "InputError"
            assert error["message"].startswith(f"{verb} does not take parallel={way!r}: ")
            assert error["message"].endswith("It takes 'data'.")


def test_error_on_one_rank_is_an_error_on_all(runs: Path) -> None:
    first, second = said(runs, "failing")
    assert second["loading"]["kind"] == "UnknownNameError"
    assert first["loading"]["kind"] == "ProcessError"
    assert "Process 1 of 2 failed: There is no preset named 'tiny-nothing'" in first["loading"]["message"]
    for way in ("data", "fsdp"):
        assert second[way] == {"kind": "ArithmeticError", "message": "a metric that a test broke", "cause": "NoneType"}
        assert first[way]["message"] == "Process 1 of 2 failed: ArithmeticError: a metric that a test broke"


def test_ranks_measure_again_after_an_error(runs: Path) -> None:
    one = said(runs, "alone")[0]["tiny-bert"]
    for rank in said(runs, "failing"):
        assert rank["afterwards"]["rows"] == one["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["fsdp", "tensor", "ablate"])
def test_no_rank_enters_a_forward_pass_that_another_will_not_come_to(runs: Path, what: str) -> None:
    first, second = said(runs, "late")
    assert second[what]["kind"] == "ArithmeticError"
    assert first[what]["message"] == "Process 1 of 2 failed: ArithmeticError: a metric that a test broke"


@pytest.mark.slow
def test_inputs_that_one_rank_alone_refuses_or_has_less_of_hold_up_nobody(runs: Path) -> None:
    first, second = said(runs, "late")
    assert second["preparing"]["kind"] == "InputError"
    assert first["preparing"]["message"].startswith("Process 1 of 2 failed: The text 'no-such-folder/text.txt' looks")
    one = said(runs, "alone")[0]["tiny-llama"]
    for rank in (first, second):
        for what in ("batches", "tensors", "kinds"):
            assert "Process 1 received other inputs than process 0" in rank[what]["message"]
        assert rank["afterwards"]["rows"] == one["rows"]


def test_other_inputs_on_a_rank_are_noticed(runs: Path) -> None:
    for rank in said(runs, "failing"):
        assert rank["inputs"]["kind"] == "InputError"
        assert "Process 1 received other inputs than process 0" in rank["inputs"]["message"]


def test_what_cannot_be_is_refused_with_a_way_out(runs: Path) -> None:
    for rank in said(runs, "refused4"):
        assert "your own module is not changed" in rank["unspread"]["message"]
        assert "already sharded: fsdp" in rank["spread"]["message"]
        assert "no tensor-parallel plan for bert" in rank["no plan"]["message"]
        assert "2 heads (num_key_value_heads) cannot be dealt to 4 processes" in rank["heads"]["message"]
        assert "expected 'data', 'fsdp' or 'tensor'" in rank["word"]["message"]


def test_rendezvous_carries_much_and_waits_for_nobody_for_ever(runs: Path) -> None:
    first, second = said(runs, "rendezvous")
    for rank in (first, second):
        assert rank["sizes"] == [20 * 2**20, 20 * 2**20 + 1]
        assert rank["whole"]
    assert first["left"]["message"] == "Process 1 of 2 failed: KeyError: 'gone'"
    assert second["left"]["kind"] == "KeyError"
    assert first["left late"]["message"] == "Process 1 of 2 failed: ArithmeticError: lost"
    assert second["left late"]["kind"] == "ArithmeticError"
    assert "Not all 2 processes arrived within 5 s" in first["absent"]["message"]
    assert (first["told"], second["told"]) == ("Process 1 of 2 failed: refused", "refused")


def test_rounding_is_not_generous() -> None:
    assert rounding(288, "float64") < 1e-13
    assert math.isclose(rounding(1, "float64"), 2.0**-52, rel_tol=1e-9)
