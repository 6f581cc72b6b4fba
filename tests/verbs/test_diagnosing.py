"""``doctor`` must be able to say no."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from rankscope.models.loading import load
from rankscope.verbs.doctor.run import doctor
from tests.own_models import GPT, ids


def test_a_sound_model_passes_every_check() -> None:
    report = doctor(GPT("pre"), ids())
    assert report.passed
    assert {check.name for check in report.checks} == {"parity", "finite", "attention", "heads"}
    assert report["heads"].status == "refused"
    assert json.loads(json.dumps(report.to_json()))["passed"] is True


def test_a_model_that_draws_random_numbers_fails_parity() -> None:
    class Noisy(GPT):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) + torch.rand(())

    report = doctor(Noisy("pre"), ids())
    assert report["parity"].status == "fail"
    assert "not deterministic" in report["parity"].detail
    assert not report.passed


def test_nan_is_located() -> None:
    model = GPT("pre")
    with torch.no_grad():
        model.blocks[1].mlp[0].weight[0, 0] = torch.nan
    report = doctor(model, ids())
    assert report["finite"].status == "fail"
    assert "block 1 mlp.out" in report["finite"].detail
    assert report["parity"].status == "pass"


def test_a_model_without_blocks_is_refused_with_advice() -> None:
    report = doctor(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 3, 4))
    assert (report["blocks"].status, report.stacks) == ("refused", ())
    assert "blocks=" in report["blocks"].detail


def test_a_shared_block_is_reported_as_such() -> None:
    assert doctor("init:tiny-albert").claims[0].says == "3 blocks, in 3 calls of 1 modules"


def test_calls_are_counted_not_blocks() -> None:
    """Two blocks in each of two modules that are called once: four blocks, and nothing is called four times."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            own = GPT("pre").blocks[0]
            self.attention, self.mlp, self.norm1, self.norm2 = own.attention, own.mlp, own.norm1, own.norm2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = x + self.attention(self.norm1(x))
                x = x + self.mlp(self.norm2(x))
            return x

    model = GPT("pre")
    model.blocks = nn.ModuleList(Pair() for _ in range(2))
    assert doctor(model, ids()).claims[0].says == "4 blocks, in 2 calls of 2 modules"


def test_a_sink_is_reported_as_such() -> None:
    check = doctor("init:tiny-gpt-oss")["attention"]
    assert check.status == "info"
    assert "a sink takes the rest" in check.detail


def test_attention_that_cannot_be_seen_is_refused_not_failed() -> None:
    report = doctor("init:tiny-mamba")
    assert report["attention"].status == "refused"
    assert report.passed


def test_head_weights_in_doctor() -> None:
    assert "weights of 4 heads read, 32 x 8 each" in doctor("init:tiny-bert")["heads"].detail
    assert doctor("init:tiny-deepseek-v3")["heads"].status == "refused"


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_both_attention_implementations_agree_on_what_is_seen(implementation: str) -> None:
    model = load("init:tiny-llama").model
    model.set_attn_implementation(implementation)
    report = doctor(model)
    assert report.passed
    assert report["attention"].status == "pass"
    assert model.config._attn_implementation == implementation
