"""Promises that every registered theorem keeps."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path

import pytest
import torch

from rankscope.ext.theory.theorems import THEOREMS, Hypothesis
from tests.ext.theory.theorems.networks import rand, random_heads, simulate

ROOT = Path(__file__).parents[2]
KINDS = ("**Bound**", "**Exact**", "**Estimate**", "**Heuristic**")


@pytest.mark.parametrize("name", THEOREMS)
def test_a_theorem_declares_its_facts(name: str) -> None:
    entry = THEOREMS[name]
    assert entry.name == name == Path(inspect.getfile(entry.function)).stem
    assert entry.statement
    assert entry.hypotheses
    assert any(kind in (entry.function.__doc__ or "") for kind in KINDS)
    keys = set(re.findall(r"^@\w+\{([^,\s]+),", (ROOT / "docs/references.bib").read_text(), flags=re.MULTILINE))
    assert {cite.key for cite in entry.cites} <= keys
    published = re.match(r"[a-z]+_\d{4}_", name) is not None
    assert bool(entry.cites) == published


@pytest.mark.parametrize("name", THEOREMS)
@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_an_evaluation_is_whole(name: str, skip: float) -> None:
    generator = torch.Generator().manual_seed(1)
    found = simulate([random_heads(generator, 4, 2, 2, 2)] * 3, rand(generator, 5, 4), skip=skip, cubic=True)
    evaluation = THEOREMS[name].function(found.network, found.layers)
    assert evaluation.theorem == name
    assert evaluation.sentence.endswith(".")
    assert len(evaluation.layers) in (0, 3)
    for bound in evaluation.layers:
        for value in (bound.log_upper, bound.log_lower, bound.log_measured):
            assert value is None or not math.isnan(value)
    assert evaluation.applies == (not evaluation.failed)


@pytest.mark.parametrize("name", [n for n in THEOREMS if THEOREMS[n].sides == "upper"])
def test_tokens_scaled_up_do_not_turn_an_upper_bound_into_a_crash(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    for scale in (1e-8, 1e8):
        found = simulate([random_heads(generator, 3, 1, 2, 2)] * 2, scale * rand(generator, 4, 3))
        assert THEOREMS[name].function(found.network, found.layers).layers


def test_a_margin_is_how_far_a_hypothesis_is_from_failing() -> None:
    assert Hypothesis("a", 1.0, 3.0).margin == 2.0
    assert Hypothesis("a", 1.0, 3.0, "at least").margin == -2.0
    assert not Hypothesis("a", math.nan, 3.0).holds
    assert Hypothesis("a", math.inf, math.inf).holds
