"""``measure`` between inputs: what it calls collapsed, what it does not, and what it will not judge."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import rankscope as rs
from rankscope.errors import InputError, LayoutError
from rankscope.linalg import numbered_vectors
from rankscope.metrics import METRICS
from rankscope.models.pretrained import pretrained_folder
from rankscope.runs.run import Run
from rankscope.verdicts.inputs import averaging_residual
from tests.flat_calls import flat

BLOCKS, VOCABULARY, TRAINED = 3, 100, 2


def small_bert() -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=BLOCKS, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False).eval()


def sentences(count: int = 12, length: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))


def finding(run: Run) -> dict[str, Any]:
    (found,) = [axis for axis in run.extra["axes"] if axis["axis"] == "inputs"]
    return dict(found)


@pytest.mark.parametrize(("apart", "headline"), [(0.1, "inputs, not tokens"), (0.0, "tokens and inputs")])
def test_a_bert_trained_to_collapse_is_called_so_from_the_block_where_it_happens(apart: float, headline: str) -> None:
    """Means of different inputs are drawn together; with ``apart``, the tokens of each are held apart."""
    model = small_bert()
    assert finding(rs.measure(model, sentences()))["code"] == "mean offset"
    late = [p for name, p in model.named_parameters() if f"layer.{TRAINED}." in name]
    optimiser = torch.optim.Adam(late, lr=5e-3)
    for step in range(80):
        x = model(input_ids=sentences(seed=100 + step)).last_hidden_state
        pooled = x.mean(1)
        between = (pooled - pooled.mean(0)).square().sum() / pooled.square().sum()
        within = (x - x.mean(1, keepdim=True)).square().sum() / x.square().sum()
        loss = between + (apart**2 - within).clamp_min(0.0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    run = rs.measure(model, sentences())
    assert finding(run)["code"] == "collapsed"
    assert f"Between inputs (mean): Collapsed in the last block ({TRAINED})" in run.verdict
    assert run.verdict.startswith(f"Collapsed along {headline}.")


class IgnoresItsInput(nn.Module):
    """Positions only."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = small_bert()
        self.bert.embeddings.word_embeddings.weight.data.zero_()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.bert(input_ids=input_ids).last_hidden_state
        return found


def test_a_network_that_ignores_its_input_is_collapsed_between_inputs_and_not_within() -> None:
    run = rs.measure(IgnoresItsInput(), sentences())
    assert run.code == "healthy"
    assert finding(run)["code"] == "floor"
    assert run.verdict.startswith("Collapsed along inputs, not tokens.")
    assert "Between inputs (mean): At the float floor in every block" in run.verdict


@pytest.mark.sampled(3)
@pytest.mark.pretrained
@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_minilm_is_not_collapsed(pooling: str) -> None:
    run = rs.measure(pretrained_folder("minilm"), rs.Inputs(tokens=32), between_inputs=pooling)
    assert finding(run)["code"] in ("healthy", "mean offset", "huge channel")
    assert "Collapsed" not in finding(run)["sentence"]
    assert run.curve("relative_residual", f"inputs.{pooling}").mean[-1] > 0.5
    nearly_equal = "they are nearly equal in block" in run.verdict.details
    assert nearly_equal == (pooling == "first"), "the class token has not seen much after block 0"


def by_hand(model: BertModel, ids: torch.Tensor, mask: torch.Tensor, pooling: str) -> list[torch.Tensor]:
    """All inputs at once, pooled straight from the hidden states."""
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states[1:]
    found = []
    for x in hidden:
        rows = [row[kept.bool()] for row, kept in zip(x, mask, strict=True)]
        pick = {"mean": lambda r: r.mean(0), "first": lambda r: r[0], "last": lambda r: r[-1]}
        found.append(torch.stack([pick[pooling](row) for row in rows]))
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_values_are_those_of_all_inputs_at_once(pooling: str, side: str) -> None:
    """Sequences of unequal length, padded on either side, in batches of several sizes: equal to 1e-10."""
    model, ids = small_bert().double(), sentences(10)
    mask = torch.ones_like(ids)
    for row in range(10):
        mask[row, : row // 2] = 0
    mask = mask if side == "left" else mask.flip(1)
    pooled = by_hand(model, ids, mask, pooling)
    for batch in (1, 3, 10):
        run = rs.measure(
            model, rs.Inputs({"input_ids": ids, "attention_mask": mask}, batch=batch), between_inputs=pooling
        )
        site = f"inputs.{pooling}"
        for name in ("relative_residual", "mean_cosine", "centred_effective_rank", "alpha_req", "uniformity"):
            got = run.curve(name, site).mean
            want = [METRICS[name].function(x).item() for x in pooled]
            np.testing.assert_allclose(got, want, rtol=1e-10)


def centred_effective_rank_by_hand(x: torch.Tensor) -> float:
    s = torch.linalg.svdvals(x - x.mean(0))[: len(x) - 1]
    p = s / s.sum()
    return float(torch.exp(-(p * p.log()).sum()))


def test_the_sentence_cites_the_block_it_names() -> None:
    """In this network the block with the smallest value is not the first with a mean offset."""
    run = rs.measure("init:deep-bert", rs.Inputs(sequences=8, tokens=8))
    values = run.curve("relative_residual", "inputs.mean").mean
    sentence = next(entry["sentence"] for entry in run.extra["axes"] if entry["axis"] == "inputs")
    value, block = re.search(r"residual: ([0-9.]+), after block (\d+)", sentence).groups()  # type: ignore[union-attr]
    assert 0 < int(block) == values.argmin()
    assert float(value) == pytest.approx(values.min(), abs=5e-3)


def test_rank_of_n_inputs_is_at_most_n_minus_1() -> None:
    model, ids = small_bert().double(), sentences(9)
    run = rs.measure(model, ids, null=True)
    (last,) = by_hand(model, ids, torch.ones_like(ids), "mean")[-1:]
    got = run.curve("centred_effective_rank", "inputs.mean").mean[-1]
    assert got == pytest.approx(centred_effective_rank_by_hand(last), rel=1e-10)
    null = run.extra["between_inputs"]["null"]["centred_effective_rank"]
    assert 7 < null["mean"] < 8, "Gaussian vectors of the same number and width"


def test_of_many_inputs_a_sample_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small_bert().double(), sentences(60)
    exact = rs.measure(model, rs.Inputs(ids, batch=7))
    monkeypatch.setattr(numbered_vectors, "ALWAYS_STORED", 20)
    monkeypatch.setattr(numbered_vectors, "LARGEST_STORED", 30)
    many = rs.measure(model, rs.Inputs(ids, batch=7))
    sample = rs.measure(model, ids[np.linspace(0, 59, 30).round().astype(int)])
    for name in ("relative_residual", "effective_rank", "alpha_req", "uniformity"):
        estimated = many.curve(name, "inputs.mean")
        assert estimated.any_estimate.all()
        np.testing.assert_allclose(estimated.mean, sample.curve(name, "inputs.mean").mean, rtol=1e-9)
    near = many.curve("relative_residual", "inputs.mean").mean
    np.testing.assert_allclose(near, exact.curve("relative_residual", "inputs.mean").mean, rtol=0.2)


class Averages(nn.Module):
    """Its one block leaves the tokens as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_means_of_long_sequences_agree_without_any_collapse() -> None:
    x = 1.0 + torch.randn(10, 3000, 16, generator=torch.Generator().manual_seed(0))
    given = rs.Inputs(x, axes="batch tokens")
    run = rs.measure(rs.Model(Averages(), blocks="layers.*"), given, metrics=["relative_residual", "mean_cosine"])
    assert run.curve("relative_residual", "inputs.mean").mean[0] < 0.03
    assert finding(run)["code"] == "mean offset"
    assert "each mean is over many tokens" in run.verdict.details
    blocks = rs.Model(Averages(), blocks="layers.*")
    last = rs.measure(blocks, given, metrics=["relative_residual"], between_inputs="last")
    assert finding(last)["code"] == "healthy"
    same = x.clone()
    same[:] = x[:1] + 1e-3 * x
    alike = rs.measure(blocks, rs.Inputs(same, axes="batch tokens"))
    assert finding(alike)["code"] == "mean offset", "the model did not make them alike"
    assert "before the first block" in alike.verdict.details


@pytest.mark.parametrize(("left", "code"), [(1.0, "mean offset"), (0.12, "mean offset"), (0.08, "collapsed")])
def test_inputs_are_judged_by_what_the_model_leaves_of_their_differences(left: float, code: str) -> None:
    """Inputs that differ by 0.088 to begin with, of which a model leaves a share."""
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(32, 1, 16, generator=generator, dtype=torch.float64)
    inside = torch.randn(1, 8, 16, generator=generator, dtype=torch.float64)
    x = 10.0 + own * 0.88 + inside
    layers = {"block.in@0": x, "block.out@0": 10.0 + left * 0.88 * own + inside}
    run = rs.judge(layers, between_inputs="mean")
    before, after = (run.curve("relative_residual", f"inputs.mean{end}").mean[0] for end in ("_in", ""))
    assert before == pytest.approx(0.088, abs=0.01)
    assert after == pytest.approx(left * before, rel=0.02)
    assert finding(run)["code"] == code


def test_averaging_residual_is_that_of_independent_tokens() -> None:
    x = 2.0 + torch.randn(400, 50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = METRICS["relative_residual"].function(x.mean(1)).item()
    residuals = METRICS["relative_residual"].function(x).numpy()
    assert averaging_residual(residuals, np.full(400, 50.0)) == pytest.approx(got, rel=0.03)


def test_the_first_token_of_a_causal_model_is_not_judged() -> None:
    ids = sentences(10)
    ids[:, 0] = 7
    run = rs.measure("init:tiny-gpt2", ids, between_inputs=["first", "last"])
    assert "Between inputs (first): not judged" in run.verdict
    assert finding(run)["code"] in ("healthy", "mean offset")
    ids[0, 0] = 8
    assert "(first): not judged" not in rs.measure("init:tiny-gpt2", ids, between_inputs="first").verdict


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        (sentences(1), "there is one input"),
        (sentences(1).repeat(9, 1), "all 9 inputs are identical"),
        (sentences(4).repeat(3, 1), "4 different inputs are too few"),
    ],
)
def test_what_cannot_be_judged_is_refused_by_name(ids: torch.Tensor, why: str) -> None:
    run = rs.measure(small_bert(), ids, between_inputs="mean")
    assert finding(run)["code"] == "unknown"
    assert why in run.verdict
    silent = rs.measure(small_bert(), ids).extra.get("axes", ())
    assert "inputs" not in [entry["axis"] for entry in silent]


def test_identical_inputs_are_seen_through_padding() -> None:
    ids, mask = sentences(9), torch.ones(9, 16, dtype=torch.long)
    ids[:] = ids[0]
    ids[4:, 12:], mask[:, 12:] = 99, 0
    run = rs.measure(
        small_bert(), rs.Inputs({"input_ids": ids, "attention_mask": mask}, batch=4), between_inputs="mean"
    )
    assert "all 9 inputs are identical" in run.verdict


class Branch(nn.Module):
    """x + Wx."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.linear(x)
        return found


class Windows(nn.Module):
    """Works on two windows of each sequence, laid beside each other along the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Branch(), Branch()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.reshape(2 * len(x), -1, 8)
        for layer in self.layers:
            h = layer(h)
        return h.reshape(x.shape)


def test_rows_that_are_not_inputs_are_refused() -> None:
    x = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(LayoutError, match="4 sequences, and the input holds 2"):
        rs.measure(rs.Model(Windows(), blocks="layers.*"), rs.Inputs(x, axes="batch tokens"), between_inputs="mean")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"between_inputs": "median"}, "'median' is not known"),
        ({"between_inputs": "mean", "sites": ["block.in"]}, "add it to sites"),
        ({"between_inputs": "mean", "metrics": ["attention_entropy"]}, "metric of tokens"),
        ({"sites": ["inputs.mean"]}, "between_inputs"),
    ],
)
def test_what_is_not_possible_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        flat(rs.measure, small_bert(), sentences(), **options)


def test_it_can_be_left_out_and_is_left_out_of_other_sites() -> None:
    for options in ({"between_inputs": "none"}, {"sites": ["block.in"]}, {"metrics": ["attention_entropy"]}):
        run = flat(rs.measure, small_bert(), sentences(), **options)
        assert "between_inputs" not in run.extra
        assert not any(site.startswith("inputs.") for site in run.table["site"].unique().to_pylist())


def test_tables_compare_report_and_conditions_know_it(tmp_path: Path) -> None:
    one, other = rs.measure(small_bert(), sentences()), rs.measure(IgnoresItsInput(), sentences())
    assert "between inputs (mean)" in str(one)
    compared = rs.compare(one, other, metrics=["relative_residual"], site="inputs.mean")
    assert compared.table["difference"].to_pylist()[0] < -0.05
    assert "inputs.mean" in str(rs.compare(one, other))
    rs.report([one], tmp_path / "page.html")
    assert "inputs.mean" in (tmp_path / "page.html").read_text()
    from rankscope.runs.conditions import parse_condition

    condition = parse_condition("relative_residual@inputs.mean <= 0.03")
    assert condition.where_met(other.table)
    assert not condition.where_met(one.table)
    assert "inputs.mean" in [axes.get_title("right") for axes in one.plot().axes], "a panel for inputs"


def met(classes: int = 2, inputs: int = 8) -> torch.Tensor:
    """Hidden states of two blocks: in the second, inputs of one class have the same vector."""
    draw = torch.Generator().manual_seed(0)
    apart, means = torch.randn(inputs, 32, generator=draw), torch.randn(classes, 32, generator=draw)
    last = means[torch.arange(inputs) % classes] + 1e-4 * torch.randn(inputs, 32, generator=draw)
    return torch.stack([apart, last])[:, :, None]


def test_inputs_of_one_class_that_meet_are_neural_collapse() -> None:
    said = {"layout": "layers batch tokens dim", "between_inputs": "mean"}
    without = rs.judge(met(), **said)
    assert finding(without)["code"] not in ("healthy", "mean offset")
    told = rs.judge(met(), inputs=rs.Inputs(labels=["cat", "dog"] * 4), **said)
    assert finding(told)["code"] in ("healthy", "mean offset")
    assert "Inputs of one class meet in the last block (1), and classes stay apart" in told.verdict
    assert "neural collapse" in told.verdict
    classes = met()[1, :2, 0].double()
    gap = (classes[0] - classes[1]).norm() / (2 * classes.square().sum()).sqrt()
    assert abs(told.extra["between_inputs"]["classes"]["apart"]["inputs.mean"][""]["1"] - float(gap)) < 1e-4
    # Classes that meet each other are a fault, whatever their inputs are called.
    wrong = rs.judge(met(), inputs=rs.Inputs(labels=[0, 1, 2, 3] * 2), **said)
    assert finding(wrong)["code"] == finding(without)["code"]
    assert "neural collapse" not in wrong.verdict
    with pytest.raises(rs.RankscopeError, match="labels has 3 entries for 8 inputs"):
        rs.judge(met(), inputs=rs.Inputs(labels=[0, 1, 2]), **said)
