"""Zeros, NaN, infinity, one token, one sequence, one block: a status or a sentence of their own, never a crash."""

from __future__ import annotations

import itertools
import logging
import math

import pytest
import torch
from torch import Tensor, nn

import rankscope as rs
from rankscope.errors import InputError
from rankscope.ext.theory.mean_field import mean_field
from rankscope.monitor import Gauge

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm1(x)
        x = x + self.attention(n, n, n, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        for block in self.blocks:
            inputs_embeds = block(inputs_embeds)
        return inputs_embeds


def net(depth: int = 2) -> Net:
    torch.manual_seed(0)
    return Net(depth).double().eval()


def tokens(sequences: int = 2, count: int = 6) -> Tensor:
    return torch.randn(sequences, count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_exact_says_that_a_sequence_is_not_finite(bad: float) -> None:
    x = tokens()
    x[0, 0, 0] = bad
    run = rs.exact(net(), {"inputs_embeds": x})
    assert run.code == "not finite"
    assert run.verdict.startswith("Not finite: NaN or infinity at block 0")
    assert "in 1 of 2 sequences. Where it is finite: no collapse" in run.verdict
    lost, kept = (set(run.table.filter(run.table["sequence"].to_numpy() == n)["status"].to_pylist()) for n in (0, 1))
    assert lost == {"not finite"}
    assert kept == {"ok"}
    alone = rs.exact(net(), {"inputs_embeds": x[:1]})
    assert alone.code == "not finite"
    assert "finite:" not in alone.verdict.removeprefix("Not finite:")


def test_exact_on_zeros_is_undefined_and_vanished() -> None:
    model = net()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    run = rs.exact(model, rs.Inputs({"inputs_embeds": 0 * tokens()}, axes="batch tokens"))
    assert run.code == "vanished"
    relative = run.select(metric="log10_relative_residual", site="block.out", arithmetic="exact")
    assert set(relative["status"].to_pylist()) == {"undefined"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "x",
    [0 * tokens(), tokens() * 1e-300, tokens() * math.nan, tokens(1), tokens(2, 1), tokens(1, 1), tokens(2, 2)],
    ids=["zeros", "tiny", "NaN", "one sequence", "one token", "one of both", "two tokens"],
)
@pytest.mark.parametrize("depth", [1, 3])
def test_a_gauge_goes_on(x: Tensor, depth: int, caplog: pytest.LogCaptureFixture) -> None:
    gauge = Gauge(net(depth), rs.Inputs({"inputs_embeds": x}, sequences=len(x)), schedule=1)
    with caplog.at_level(logging.WARNING):
        readings = [gauge.step(step) for step in range(3)]
    assert all(reading is not None for reading in readings)
    assert "disabled" not in caplog.text


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "x",
    [0 * tokens(), tokens() * math.nan, tokens(1), tokens(2, 1), tokens(1, 1), tokens(8, 2), tokens(8, 6) * 0],
    ids=["zeros", "NaN", "one sequence", "one token", "one of both", "two tokens", "eight zeros"],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_every_verb_has_a_sentence(x: Tensor, depth: int) -> None:
    for verb in (rs.measure, rs.exact, rs.ablate):
        run = verb(net(depth), {"inputs_embeds": x})
        assert run.verdict.strip().endswith(".")
        assert "nan" not in run.verdict.replace("NaN", "").lower().split()


ZEROS = ("value_std", "output_std", "query_std", "mlp_in_std", "mlp_out_std", "embedding_std", "attention_scale")


def degenerate_designs() -> list[rs.Design]:
    sizes = {"depth": 2, "width": 8, "heads": 2, "tokens": 64}
    found = []
    for place, mlp, skip in itertools.product(("pre", "post"), ("relu", "gelu", "none"), (0.0, 1.0)):
        plain = {**sizes, "norm_place": place, "mlp": mlp, "attention_skip": skip, "mlp_skip": skip}
        found += [rs.Design(**plain), rs.Design(**plain, initial_cosine=0.5)]
        found += [rs.Design(**plain, **{name: 0.0}) for name in ZEROS]
        found += [rs.Design(**plain, branch_norm=True, value_std=0.0)] if place == "pre" else []
    return found


def test_oracles_answer_designs_of_zeros() -> None:
    for design in degenerate_designs():
        for count in (2, 64):
            assert not any(value == math.inf for value in mean_field(design, count, 3).log10_relative)


def test_predict_answers_or_says_why_not() -> None:
    """Also the design whose limit of many tokens once divided by zero: post-norm, ReLU, no skips."""
    plain = {"depth": 2, "width": 8, "heads": 2, "tokens": 64, "mlp": "relu"}
    without = {"attention_skip": 0.0, "mlp_skip": 0.0}
    assert rs.predict(rs.Design(**plain, **without), seeds=2, tokens=64, most_blocks=2).verdict.endswith(".")
    refused = {
        "every token is zero": rs.Design(**plain, **without, value_std=0.0),
        "branch_norm cannot give a branch of zeros a size": rs.Design(
            **plain, norm_place="pre", branch_norm=True, value_std=0.0
        ),
    }
    for why, design in refused.items():
        with pytest.raises(InputError, match=why):
            rs.predict(design, seeds=2, tokens=64, most_blocks=2)
