"""Attention as an axis of the verdict: closed forms of the thresholds, and what is said of which heads."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch

import rankscope as rs
from rankscope.metrics import METRICS
from rankscope.runs.rows import RowWriter
from rankscope.verdicts.attention import attention_findings
from rankscope.verdicts.axes import AxisFinding, across_axes
from rankscope.verdicts.states import ONE_HOT_ENTROPY, UNIFORM_ENTROPY
from rankscope.verdicts.verdict import Verdict


def entropy(probabilities: torch.Tensor) -> float:
    return float(METRICS["attention_entropy"].function(probabilities[None].double()))


@pytest.mark.parametrize("keys", [16, 128, 1024])
def test_uniform_is_a_tenth_of_variation_and_one_hot_99_percent(keys: int) -> None:
    """H = log k - (1 - 1/k) s²/2 for scores of a small standard deviation s; h(p) + (1 - p) log(k - 1) for a peak."""
    scores = torch.randn(400, keys, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for s in (0.05, 0.2):
        found = entropy((s * scores).softmax(-1))
        assert found == pytest.approx(1 - (1 - 1 / keys) * s**2 / (2 * math.log(keys)), abs=2e-4)
        assert (found >= UNIFORM_ENTROPY) == (s < 0.1)
    for peak in (0.9, 0.995):
        rows = torch.full((keys, keys), (1 - peak) / (keys - 1), dtype=torch.float64)
        rows[:, 3] = peak
        closed = -peak * math.log(peak) - (1 - peak) * math.log((1 - peak) / (keys - 1))
        assert entropy(rows) == pytest.approx(closed / math.log(keys), rel=1e-12)
        assert (entropy(rows) <= ONE_HOT_ENTROPY) == (peak > 0.98)


def findings(
    grid: Mapping[int, list[float]], sinks: Mapping[int, list[float]] | None = None, tokens: int = 16
) -> AxisFinding:
    """Two sequences with these entropies by block and head; the second differs a little, towards the middle."""
    writer = RowWriter()
    for metric, values in (("attention_entropy", grid), ("first_token_sink_rate", sinks or {})):
        for layer, row in values.items():
            both = np.array([row, row])
            writer.add(metric=metric, site="attention.probs", stack=None, layer=layer, first_sequence=0, values=both,
                       statuses=np.zeros(both.shape, int), head_axis=True)  # fmt: skip
    (found,) = attention_findings(writer.table(), {None: {0: tokens, 1: tokens}})
    return found


def test_uniform_everywhere_one_hot_everywhere_and_neither() -> None:
    flat = findings({0: [1.0, 0.9995], 1: [0.9999, 1.0]})
    assert flat.code == "collapsed"
    assert flat.sentence == "Attention is uniform in all heads (usual at initialisation)."
    assert "heads from 0.9995 to 1.0000" in flat.details
    picked = findings({0: [0.0, 0.01], 1: [0.004, 0.0]})
    assert picked.code == "collapsed"
    assert picked.sentence.startswith("Attention is one-hot in all heads")
    assert "heads from 0.0000 to 0.0100" in picked.details
    between = findings({0: [0.5, 0.9]})
    assert (between.code, between.sentence) == (
        "healthy",
        "",
    )
    one_left = findings({0: [1.0, 1.0], 1: [1.0, 0.99]})
    assert one_left.code == "healthy"
    assert one_left.sentence == "Attention is uniform in 3 of 4 heads (all in block 0)."
    assert "uniform heads in block 0: 0, 1; block 1: 0" in one_left.details


def test_a_sink_is_named_and_no_fault() -> None:
    found = findings({0: [0.4, 0.3], 1: [0.5, 0.01]}, {0: [0.1, 0.2], 1: [0.7, 0.99]})
    assert found.code == "healthy"
    assert "A sink on the first token in 2 of 4 heads (usual in trained models)." in found.sentence
    assert "one-hot" not in found.sentence, "a head that picks the first token is a sink"
    assert "sink" not in findings({0: [0.4]}, {0: [0.6]}, tokens=4).sentence, "two of four tokens may have it by chance"


def test_a_headline_names_saturated_attention_and_not_uniform() -> None:
    tokens = Verdict("No collapse.", (), "healthy")
    assert str(across_axes(tokens, [findings({0: [1.0]})])).startswith("No collapse.")
    told = str(across_axes(tokens, [findings({0: [0.0]})])).splitlines()
    assert told[0] == "Collapsed along attention, not tokens."
    assert told[1].startswith("Attention is one-hot")


@pytest.mark.parametrize("preset", ["tiny-bert", "tiny-gpt2"])
def test_a_model_whose_attention_ignores_tokens_is_said_to(preset: str) -> None:
    """Also under a causal mask, where the first row has one key to choose from."""
    model = rs.load(f"init:{preset}").model
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("query", "key", "c_attn")):
            torch.nn.init.zeros_(parameter)
    run = rs.measure(model, torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(0)))
    (found,) = [axis for axis in run.extra["axes"] if axis["axis"] == "attention"]
    assert found["code"] == "collapsed"
    assert "Attention is uniform in all heads" in run.verdict
