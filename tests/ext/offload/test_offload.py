"""Every verb that streams gives what it gives with the model in memory: the same rows, bit by bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rankscope
from rankscope.errors import InputError, LoadError, UnsupportedConfigError
from rankscope.ext.offload import schedule
from rankscope.ext.theory.bound.run import bound
from rankscope.models.loading import load
from rankscope.runs.run import Run
from rankscope.verbs._spec import VERBS
from rankscope.verbs.ablate.run import ablate
from rankscope.verbs.exact.run import exact
from rankscope.verbs.measure.run import measure
from tests.ext.offload.folders import same_bits, saved
from tests.flat_calls import flat

FAMILIES = ("llama", "gpt2", "bert", "gemma2", "qwen3", "mistral")
SHAPE = {"sequences": 5, "tokens": 20, "batch": 2}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in made:
            made[family] = saved(f"init:tiny-{family}", tmp_path_factory.mktemp(family))
        return made[family]

    return folder_of


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the budget had no room for streams."""
    monkeypatch.setattr(schedule, "keeps_streams_in_memory", lambda need, memory: False)


def without_stream(run: Run) -> dict[str, Any]:
    return {name: value for name, value in run.extra.items() if name != "offload"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_measure(folder: Callable[[str], Path], family: str, dtype: str | None) -> None:
    options = {**SHAPE, "dtype": dtype, "similarity": True, "null": True}
    whole, streamed = flat(measure, folder(family), **options), flat(measure, folder(family), offload=True, **options)
    assert same_bits(whole, streamed)
    assert streamed.extra["offload"]["blocks_read"] == 3
    assert without_stream(streamed) == without_stream(whole)
    for fact in ("verdict", "evidence", "floor", "null", "notes"):
        assert getattr(streamed, fact) == getattr(whole, fact), fact
    facts = [run.provenance.to_json() for run in (whole, streamed)]
    differ = {name for name in facts[0] if facts[0][name] != facts[1][name]}
    assert differ <= {"wall_seconds", "created", "structure"}
    claims, offloaded = ([str(dict(one)) for one in run.provenance.structure] for run in (whole, streamed))
    assert set(offloaded) <= set(claims), "what is claimed of stand-ins is claimed of the weights"
    assert len(offloaded) >= len(claims) - 1, "which tokens act on which may be lost in the rounding of stand-ins"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["albert", "gpt-neox", "modernbert", "xlnet", "falcon"])
def test_other_families(folder: Callable[[str], Path], family: str, short_of_memory: None) -> None:
    assert same_bits(
        measure(folder(family), rankscope.Inputs(**SHAPE)),
        measure(rankscope.Model(folder(family), offload=True), rankscope.Inputs(**SHAPE)),
    )


def test_all_sites_and_policies(folder: Callable[[str], Path]) -> None:
    sites = [
        "block.in",
        "attention.out",
        "attention.sum",
        "mlp.out",
        "mlp.sum",
        "block.out@1",
        "attention.probs@2",
        "final@2",
    ]
    options = {**SHAPE, "sites": sites, "tokens_policy": "no-first"}
    assert same_bits(flat(measure, folder("llama"), **options), flat(measure, folder("llama"), offload=True, **options))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_ablate(folder: Callable[[str], Path], family: str, short_of_memory: None) -> None:
    options = {**SHAPE, "masks": ["own", "causal & window(3)"], "variants": ["pure", "+norm", "full"]}
    whole, streamed = flat(ablate, folder(family), **options), flat(ablate, folder(family), offload=True, **options)
    assert same_bits(whole, streamed)
    assert (streamed.verdict, streamed.notes) == (whole.verdict, whole.notes)
    assert streamed.extra["offload"]["blocks_read"] == 3


def test_ablate_leaves_out_what_cannot_be_done(folder: Callable[[str], Path]) -> None:
    whole = ablate(folder("gpt-neox"), rankscope.Inputs(**SHAPE))
    streamed = ablate(rankscope.Model(folder("gpt-neox"), offload=True), rankscope.Inputs(**SHAPE))
    assert streamed.notes == whole.notes
    assert same_bits(whole, streamed)


PURE = {"skip": 0.0, "mlp": "drop", "norm": "identity"}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", [pytest.param("bert", marks=pytest.mark.slow), "llama"])
@pytest.mark.parametrize(
    "cut",
    [
        PURE,
        pytest.param({"skip": 0.5, "stability": True}, marks=pytest.mark.slow),
        {"plain": False, "mask": "causal", **PURE},
    ],
)
def test_exact(folder: Callable[[str], Path], family: str, cut: dict[str, Any], short_of_memory: None) -> None:
    options = {"sequences": 2, "tokens": 12, "dtype": "bfloat16", **cut}
    whole, streamed = flat(exact, folder(family), **options), flat(exact, folder(family), offload=True, **options)
    assert same_bits(whole, streamed)
    law = "law" in whole.table["arithmetic"].to_pylist()
    assert law == (family == "bert" and cut == PURE)
    assert streamed.provenance.operations == whole.provenance.operations


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_bound(folder: Callable[[str], Path], family: str) -> None:
    options = {"sequences": 3, "tokens": 12, "batch": 2}
    whole, streamed = flat(bound, folder(family), **options), flat(bound, folder(family), offload=True, **options)
    assert same_bits(whole, streamed)
    assert without_stream(streamed) == without_stream(whole)


def test_what_streams_is_a_folder_and_one_stack_of_blocks(folder: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match="already in memory"):
        measure(rankscope.Model(load("init:tiny-bert").model, offload=True))
    with pytest.raises(LoadError, match="random initialisation"):
        measure(rankscope.Model("init:tiny-bert", offload=True))
    with pytest.raises(LoadError, match="not on this machine"):
        measure(rankscope.Model("someone/some-model", offload=True))
    with pytest.raises(UnsupportedConfigError, match="several stacks"):
        measure(rankscope.Model(folder("t5"), offload=True), rankscope.Inputs(**SHAPE))


def test_arguments_that_do_not_go_together(folder: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match="needs offload"):
        measure(rankscope.Model("init:tiny-bert", memory="3GiB"))
    with pytest.raises(InputError, match="is not a size"):
        measure(rankscope.Model(folder("bert"), offload=True, memory="much"))
    with pytest.raises(InputError, match="random copy"):
        ablate(rankscope.Model(folder("bert"), offload=True), weights="both")
    with pytest.raises(InputError, match="one process"):
        measure(rankscope.Model(folder("bert"), offload=True, parallel="data"))


def test_a_budget_no_block_fits_in_is_refused_with_an_estimate(folder: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match=r"takes about .* GiB \(process .* block .* work"):
        measure(rankscope.Model(folder("bert"), offload=True, memory="50MiB"), rankscope.Inputs(**SHAPE))


@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if verb.execution is not None])
def test_every_verb_takes_offload_or_says_why_not(folder: Callable[[str], Path], verb: str) -> None:
    reason = VERBS[verb].execution.no_offload
    run = getattr(rankscope, verb)
    if reason is None:
        assert "offload" in flat(run, folder("gpt2"), sequences=1, tokens=8, offload=True).extra
    else:
        with pytest.raises(InputError, match=re.escape(f"{verb} does not take offload=True: {reason}. Leave it out.")):
            flat(run, folder("gpt2"), sequences=1, tokens=8, offload=True)
