"""``decompose``: rows that add up, under surgery, and a run that survives being saved."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.compute as pc
import pytest
import torch

from rankscope import Inputs, Model, Surgery
from rankscope.errors import InputError
from rankscope.ext.paths.decompose.judge import by_length, through_heads
from rankscope.ext.paths.decompose.run import decompose
from rankscope.models.loading import load
from rankscope.runs.rows import only
from rankscope.runs.run import Run, load_run
from rankscope.surgery.operating import operate
from tests.own_models import ids


@pytest.fixture(scope="module")
def run() -> Run:
    return decompose(
        load("init:tiny-gpt2", dtype="float64").model, ids(3, 9), marginals=["heads", "layers"], at_layers=[0]
    )


def test_shares_add_up_to_one(run: Run) -> None:
    assert run.extra["sum_error"] < 1e-13
    for layer in (None, 0):
        shares = by_length(run.table, "projection_share", layer=layer)
        assert shares.mean.sum() == pytest.approx(1.0, rel=1e-12)
    assert by_length(run.table, "projection_share").lengths.tolist() == [0, 1, 2, 3]
    assert by_length(run.table, "projection_share", layer=0).lengths.tolist() == [0, 1]


def test_json_has_lengths_and_the_error_at_the_top(run: Run) -> None:
    answer = json.loads(json.dumps(run.to_json()))
    assert answer["sum_error"] == run.extra["sum_error"]
    assert {row["length"] for row in answer["rows"] if "length" in row} == {0, 1, 2, 3}


def test_heads_add_up_to_their_layer(run: Run) -> None:
    heads = through_heads(run.table, "projection_share")
    layers = only(run.table, metric="projection_share", paths="through a layer")
    for layer in range(3):
        expected = pc.mean(only(layers, layer=layer)["value"]).as_py()
        assert heads[layer].sum() == pytest.approx(expected, rel=1e-9)


def test_saved_and_read_again(run: Run, tmp_path) -> None:
    again = load_run(run.save(tmp_path / "run"))
    assert again.extra == run.extra
    assert again.table.equals(run.table)
    assert str(again) == str(run)


def test_text_and_figure(run: Run) -> None:
    words = str(run)
    assert "length  paths" in words
    assert "The sum over all lengths equals the forward pass to" in words
    assert len(run.plot().axes) == 2


def test_under_surgery_the_cut_network_is_decomposed() -> None:
    model = load("init:tiny-bert", dtype="float64").model
    with operate(model, Surgery(skip=0.0, mlp="drop")):
        run = decompose(model, ids(2, 9))
    shares = by_length(run.table, "projection_share")
    assert run.extra["sum_error"] < 1e-13
    assert run.provenance.operations
    assert shares.lengths[-1] == 3
    counts = run.extra["path_counts"][""]
    assert [int(count) for count in counts] == [0, 0, 0, 4**3]


def test_the_logit_is_split() -> None:
    model = load("init:tiny-gpt2", dtype="float64", model_class="AutoModelForCausalLM").model
    run = decompose(model, ids(2, 9), token=7)
    parts = by_length(run.table, "logit").mean.sum()
    with torch.no_grad():
        expected = model(ids(2, 9)).logits[:, -1, 7].mean()
    assert parts == pytest.approx(float(expected), rel=1e-12)
    with pytest.raises(InputError, match="model_class"):
        decompose("init:tiny-gpt2", token=7)


def test_origins_add_up_to_the_whole() -> None:
    run = decompose(Model("init:tiny-bert", dtype="float64"), Inputs(sequences=2, tokens=9), origins=True)
    whole = by_length(run.table, "projection_share").mean
    parts = [by_length(run.table, "projection_share", origin=name).mean for name in ("embedding", "mlp", "bias")]
    assert np.allclose(sum(parts), whole, rtol=1e-10)


def test_wrong_words() -> None:
    with pytest.raises(InputError, match="heads"):
        decompose("init:tiny-bert", marginals=["head"])
    with pytest.raises(InputError, match="blocks 0 to 2"):
        decompose("init:tiny-bert", at_layers=[9])


def test_a_head_that_changes_the_stream_has_no_logit_by_paths() -> None:
    from transformers import BertConfig, BertForMaskedLM

    shape = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForMaskedLM(BertConfig(**shape, vocab_size=100)).eval()
    with pytest.raises(InputError, match="does not read the final stream"):
        decompose(model, ids(2, 9), token=7)
    assert not model.get_output_embeddings()._forward_pre_hooks
