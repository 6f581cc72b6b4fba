"""``measure`` of long sequences: by tiles, within memory, and honest about estimates."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import rankscope as rs
from rankscope.errors import InputError
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import METRICS
from rankscope.models.loading import load
from rankscope.runs.rows import only
from rankscope.runs.run import Run
from tests.flat_calls import flat

ATTENTION = [spec.name for spec in METRICS.values() if spec.side == "attention" and spec.needs != "spectrum"]


def values(run: Run, metric: str, site: str = "attention.probs") -> np.ndarray:
    return only(run.table, metric=metric, site=site)["value"].to_numpy()


@pytest.mark.parametrize("model", ["init:tiny-llama", "init:tiny-bert", "init:tiny-bart"])
def test_blockwise_equals_dense(model: str) -> None:
    """Causal with grouped queries; padded; with cross-attention."""
    texts = ["a few words", "rather more words than the other one has, so that it is padded"]
    sites = ["attention.probs", "cross_attention.probs"]
    options = {"metrics": ATTENTION, "sites": sites, "tokens": 24, "dtype": "float64"}
    dense, tiles = (
        flat(rs.measure, model, texts, attention_algorithm=way, **options) for way in ("dense", "blockwise")
    )
    assert dense.table.num_rows == tiles.table.num_rows > 0
    assert tiles.select(status="estimated").num_rows == 0
    for site in set(dense.table["site"].to_pylist()):
        for metric in ATTENTION:
            np.testing.assert_allclose(values(tiles, metric, site), values(dense, metric, site), rtol=1e-10)


def test_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.verbs.reader.DENSE_BYTES", 0)
    monkeypatch.setattr("rankscope.stream.attention_calls.AttentionCall.probs", lambda call: pytest.fail("held"))
    run = rs.measure("init:tiny-llama", rs.Inputs(sequences=1, tokens=16))
    assert np.isfinite(values(run, "attention_entropy")).all()


def test_a_singular_value_of_attention_that_is_not_held_is_refused() -> None:
    metrics = ["attention_entropy", "attention_contraction"]
    run = rs.measure(
        "init:tiny-llama", rs.Inputs(sequences=1, tokens=300), attention_algorithm="blockwise", metrics=metrics
    )
    assert set(run.table["metric"].to_pylist()) == {"attention_entropy"}
    (note,) = run.notes
    assert "attention_contraction needs all probabilities" in note
    assert "--attention-algorithm dense" in note


def test_residual_of_what_heads_have_mixed() -> None:
    run = rs.measure(
        "init:tiny-bert", rs.Inputs(sequences=2, tokens=12), sites=["attention.mixed"], metrics=["relative_residual"]
    )
    rows = run.table
    assert set(rows["head"].to_pylist()) == {0, 1, 2, 3}
    x = torch.randn(2, 3, 5, 4)
    assert METRICS["relative_residual"].function(Tokens(x)).shape == (2, 3)


def test_eager_attention_cannot_go_by_tiles() -> None:
    model = load("init:tiny-bert").model
    model.set_attn_implementation("eager")
    with pytest.raises(InputError, match="attn_implementation='sdpa'"):
        rs.measure(
            model, torch.ones(1, 6, dtype=torch.long), attention_algorithm="blockwise", metrics=["attention_entropy"]
        )


_PEAK = """
import resource, torch, rankscope as rs
rs.measure("init:tiny-llama", rs.Inputs(random_tokens=True, sequences=1, tokens=64))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run = rs.measure("init:tiny-llama", rs.Inputs(random_tokens=True, sequences=1, tokens=8192))
assert run.select(metric="attention_entropy", status="ok").num_rows > 0
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
def test_8192_tokens_take_a_fraction_of_their_probabilities() -> None:
    """One block's probabilities would be 4 heads x 8192 x 8192 x 4 bytes = 1 GiB."""
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 256
