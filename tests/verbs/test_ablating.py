"""``ablate``: each arm of the grid is the network its name says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rankscope import Inputs
from rankscope.errors import LoadError, UnknownNameError
from rankscope.metrics.residual import relative_residual
from rankscope.models.loading import load
from rankscope.verbs.ablate.judge import arms
from rankscope.verbs.ablate.run import ablate
from rankscope.verbs.measure.run import measure
from tests.own_models import GPT, ids


def test_the_full_arm_is_measure() -> None:
    tokens = ids(3, 9)
    model = load("init:tiny-bert").model
    (arm,) = arms(ablate(model, tokens, variants=["full"]).table)
    expected = measure(model, tokens).curve("relative_residual", "block.out")
    assert np.array_equal(arm.line.mean, expected.mean)


def test_the_pure_arm_is_attention_alone() -> None:
    torch.manual_seed(0)
    model = GPT("pre", causal=False).double()
    tokens = ids(2, 8)
    (arm,) = arms(ablate(model, tokens, variants=["pure"]).table)
    with torch.no_grad():
        x = model.embed(tokens) + model.positions[:8]
        expected = []
        for block in model.blocks:
            x = block.attention(x)
            expected.append(float(relative_residual(x).mean()))
    assert np.allclose(arm.line.mean, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("variant", "compute"),
    [
        ("+norm", lambda block, x: block.attention(block.norm1(x))),
        ("+skip", lambda block, x: x + block.attention(x)),
        ("+mlp", lambda block, x: block.mlp(block.attention(x))),
        ("+norm+skip", lambda block, x: x + block.attention(block.norm1(x))),
        ("+norm+mlp", lambda block, x: block.mlp(block.norm2(block.attention(block.norm1(x))))),
    ],
)
def test_every_arm_against_the_network_written_out(variant: str, compute) -> None:
    torch.manual_seed(0)
    model = GPT("pre", causal=False).double()
    tokens = ids(2, 8)
    (arm,) = arms(ablate(model, tokens, variants=[variant]).table)
    with torch.no_grad():
        x = model.embed(tokens) + model.positions[:8]
        expected = []
        for block in model.blocks:
            x = compute(block, x)
            expected.append(float(relative_residual(x).mean()))
    assert np.allclose(arm.line.mean, expected, rtol=1e-9, atol=0)


def test_masks_are_columns() -> None:
    run = ablate(
        "init:tiny-bert", Inputs(sequences=2, tokens=12), variants=["pure"], masks=["own", "causal", "window(1)"]
    )
    found = {arm.mask: arm.line.mean for arm in arms(run.table)}
    assert set(found) == {"own", "causal", "window(1)"}
    assert found["window(1)"][-1] > found["causal"][-1] > found["own"][-1]


def test_what_a_model_cannot_undergo_is_left_out_and_said() -> None:
    run = ablate("init:tiny-mamba", Inputs(sequences=2, tokens=12), variants=["full"], masks=["own", "causal"])
    assert {arm.mask for arm in arms(run.table)} == {"own"}
    assert any("causal was left out" in note for note in run.notes)


def test_given_and_initial_weights_side_by_side() -> None:
    trained = load("init:tiny-bert", seed=1).model
    run = ablate(trained, ids(2, 9), variants=["full"], weights="both")
    assert {arm.weights for arm in arms(run.table)} == {"given", "init"}
    with pytest.raises(LoadError, match="not a transformers model"):
        ablate(GPT("pre"), ids(2, 9), weights="init")


def test_unknown_variant() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean '\+norm"):
        ablate("init:tiny-bert", variants=["+nrom"])


def test_the_model_runs_as_before_afterwards() -> None:
    model = load("init:tiny-gpt2").model
    with torch.no_grad():
        before = model(ids())[0]
        ablate(model, ids(2, 9), masks=["own", "window(1)"])
        assert torch.equal(model(ids())[0], before)
