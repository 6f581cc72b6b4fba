"""NaN and infinity: located, and said before anything else."""

from __future__ import annotations

import math

import pytest
import torch

import rankscope as rs
from rankscope.models.loading import load

IDS = torch.randint(5, 60, (3, 8), generator=torch.Generator().manual_seed(0))


def test_a_weight_that_is_not_a_number_is_found() -> None:
    model = load("init:tiny-bert").model
    with torch.no_grad():
        model.encoder.layer[1].attention.output.dense.weight[0, 0] = math.nan
    run = rs.measure(model, IDS)
    assert run.verdict.startswith("Not finite: NaN or infinity at block 1 (block.out)")
    assert "in 3 of 3 sequences" in run.verdict
    assert run.evidence[0] == {"code": "not finite", "site": "block.out", "stack": None, "layer": 1}
    assert "encoder.layer.1.attention.output.dense (Linear); its weight holds 1 of 1,024 values" in run.notes[-1]


def test_sites_inside_the_block_locate_it_closer() -> None:
    model = load("init:tiny-bert").model
    with torch.no_grad():
        model.encoder.layer[1].output.dense.bias[3] = math.inf
    run = rs.measure(model, IDS, sites=["attention.out", "attention.sum", "mlp.out", "block.out"])
    assert "at block 1 (mlp.out)" in run.verdict


def test_an_overflow_is_told_from_a_broken_weight() -> None:
    model = load("init:tiny-gpt2").model
    with torch.no_grad():
        model.h[1].mlp.c_proj.weight.fill_(1e38)
        model.h[1].mlp.c_fc.bias.fill_(1e3)
    run = rs.measure(model, IDS)
    assert run.verdict.startswith("Not finite")
    assert "h.1.mlp.c_proj" in run.notes[-1]
    assert "too large for the format" in run.notes[-1]


def with_one_bad_sequence() -> tuple[torch.nn.Module, torch.Tensor]:
    """A model that knows one token as NaN, and ids of three sequences of which the second holds it."""
    model = load("init:tiny-gpt2").model
    with torch.no_grad():
        model.wte.weight[7] = math.nan
    ids = IDS.clone()
    ids[ids == 7] = 8
    ids[1, 0] = 7
    return model, ids


def test_one_bad_sequence_of_several_is_counted_and_the_others_are_judged() -> None:
    model, ids = with_one_bad_sequence()
    run = rs.measure(model, rs.Inputs(ids, batch=1))
    assert "in 1 of 3 sequences. Where it is finite: no collapse" in run.verdict
    assert "wte (Embedding)" in run.notes[-1]


def test_an_ablation_says_first_which_networks_are_not_finite_and_where() -> None:
    model = load("init:tiny-bert").model
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight[0, 0] = math.nan
    run = rs.ablate(model, IDS, variants=["pure", "+skip", "+mlp", "full"])
    assert run.verdict == (
        "Not finite in +mlp, full: NaN or infinity at block 1 (block.out), the first place measured where they are, "
        "in 3 of 3 sequences."
    )
    place = {"code": "not finite", "site": "block.out", "stack": None, "layer": 1}
    lost = [{**place, "weights": "given", "mask": "own", "variant": variant} for variant in ("+mlp", "full")]
    assert [dict(item) for item in run.evidence if "code" in item] == lost
    assert run.evidence[0] == lost[0]
    # What a branch does whose inputs are all NaN cannot be told, so that no MLP is dropped.
    assert [note.split(" under ")[0] for note in run.notes if "was left out" in note] == ["pure", "+skip"]
    assert run.notes[-1].startswith("In +mlp (given weights, own mask): the first module to return NaN or infinity is")
    assert "encoder.layer.1.output.dense (Linear); its weight holds 1 of 2,048 values" in run.notes[-1]


def test_an_ablation_tells_networks_under_other_masks_apart() -> None:
    model = load("init:tiny-gpt2").model
    with torch.no_grad():
        model.h[0].attn.c_proj.bias[0] = math.inf
    run = rs.ablate(model, IDS, variants=["full"], masks=["own", "window(1)"])
    assert run.verdict.startswith("Not finite in full (given weights, own mask), full (given weights, window(1) mask):")
    assert "Where it is finite" not in run.verdict


def test_one_bad_sequence_of_an_ablation_leaves_the_others_to_be_judged() -> None:
    model, ids = with_one_bad_sequence()
    run = rs.ablate(model, rs.Inputs(ids, batch=1), variants=["full"])
    assert "in 1 of 3 sequences. Where it is finite: relative residual after the last block: 0." in run.verdict


def test_a_random_twin_is_finite_where_the_given_weights_are_not() -> None:
    model = load("init:tiny-bert").model
    with torch.no_grad():
        model.encoder.layer[0].attention.output.dense.weight[0, 0] = math.nan
    run = rs.ablate(model, IDS, variants=["full"], weights="both")
    assert run.verdict.startswith("Not finite in full (given weights, own mask): NaN or infinity at block 0")
    assert "Where it is finite: init weights, own mask: relative residual after the last block: 0." in run.verdict


@pytest.mark.parametrize("spec", ["init:tiny-bert", "init:tiny-llama"])
def test_a_whole_model_has_no_such_note(spec: str) -> None:
    run = rs.measure(spec, IDS)
    assert not run.verdict.startswith("Not finite")
    assert run.notes == ()
