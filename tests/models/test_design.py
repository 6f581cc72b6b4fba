"""Designs, and what is sampled from them against networks whose weights are drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rankscope.errors import InputError
from rankscope.ext.theory.sampling import Sampler
from rankscope.models.design import Design

SMALL = Design(depth=3, width=24, heads=3, tokens=6)


class Drawn(Sampler):
    """The same blocks with every matrix drawn in full."""

    def _linear(self, x: torch.Tensor, columns: int, std: float) -> torch.Tensor:
        return x @ (std * self._normal(x.shape[-1], columns))


def drawn_in_full(design: Design, seed: int) -> Drawn:
    return Drawn(
        design, None, torch.Generator().manual_seed(seed), lambda x: torch.eye(x.shape[-1], dtype=torch.float64)
    )


def residual(x: torch.Tensor) -> float:
    return math.log10(float((x - x.mean(1, keepdim=True)).norm() / x.norm()))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_place": "pre", "norm": "rmsnorm", "mlp": "swiglu", "kv_heads": 1},
        {"skip_gain": 0.0, "positions": "alibi"},
        {"positions": "rope", "mlp": "none", "norm": "none", "norm_place": "none"},
    ],
    ids=["post-norm", "llama-like", "alibi without skips", "rope without norms"],
)
def test_sampled_blocks_have_the_law_of_drawn_weights(changes: dict[str, object]) -> None:
    """Mean of log10 residual after three blocks over 300 seeds each: equal within four standard errors."""
    design = SMALL.changed(weight_std=0.25, **changes)
    logs = []
    for make in (drawn_in_full, lambda d, s: Sampler(d, None, torch.Generator().manual_seed(10_000 + s))):
        values = []
        for seed in range(300):
            sampler = make(design, seed)
            x = sampler.tokens(6)
            for _ in range(3):
                x = sampler.block(x)
            values.append(residual(x))
        logs.append(np.array(values))
    error = math.sqrt(sum(v.var(ddof=1) / len(v) for v in logs))
    assert abs(logs[0].mean() - logs[1].mean()) < 4 * error
    assert logs[0].std() == pytest.approx(logs[1].std(), rel=0.3)


def test_first_tokens_have_their_cosine_and_scale() -> None:
    design = Design(depth=1, width=20_000, heads=1, initial_cosine=0.4, embedding_std=0.1, embedding_norm=False)
    x = Sampler(design, None, torch.Generator().manual_seed(0)).tokens(3)[0]
    gram = x @ x.T / 20_000
    assert float(gram.diagonal().mean()) == pytest.approx(0.01, rel=0.05)
    assert float(gram[0, 1] / gram[0, 0]) == pytest.approx(0.4, abs=0.03)


def test_changes_follow_each_other() -> None:
    design = Design(depth=12, width=768, heads=12).changed(width=384)
    assert (design.head_dim, design.mlp_width, design.kv_heads) == (32, 1536, 12)
    assert design.changed(heads=4).head_dim == 96
    assert design.changed(branch_scale=0.5).mlp_scale == 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"depth": 0},
        {"depth": True},
        {"width": 1.5},
        {"heads": 12, "kv_heads": 5},
        {"mlp": "tanh"},
        {"norm": "none"},
        {"value_std": -1.0},
        {"value_std": float("nan")},
        {"attention_skip": float("inf")},
        {"initial_cosine": 1.5},
        {"colour": 3},
    ],
    ids=str,
)
def test_a_design_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"Expected|Give|Set|has no"):
        Design(depth=12, width=768, heads=12).changed(**changes)
