"""Under a replaced mask padding stays hidden: content tokens come out as they do without it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope import Surgery
from rankscope.errors import UnsupportedOperationError
from rankscope.models.loading import load
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.surgery.operating import operate
from tests.own_models import ids

LENGTHS = (11, 7)
EDITS: dict[str, dict[str, Any]] = {
    "window": {"mask": "window(2)"},
    "causal": {"mask": "causal"},
    "causal window": {"mask": "causal_window(3)", "skip": 0.0},
    "window within": {"mask": "window(3)", "mask_mode": "intersect"},
    "or window": {"mask": "window(2)", "mask_mode": "unite"},
    "complete": {"mask": "complete"},
    "uniform": {"attention": "uniform"},
    "centred causal": {"mask": "causal", "attention": "centred"},
    "hot": {"temperature": 1000.0},
}
SEES_INSIDE_SCORES_ONLY = {"window", "or window", "complete"}


@cache
def family(name: str, implementation: str) -> Any:
    with quiet_transformers():
        model = load(f"init:{name}", dtype=torch.float64).model.eval()
    model.set_attn_implementation(implementation)
    return model


def run(model: Any, tokens: Tensor, keep: Tensor, edit: dict[str, Any]) -> Tensor:
    positions = {}
    if model.config.model_type == "llama":
        positions = {"position_ids": (keep.cumsum(dim=1) - 1).clamp(min=0), "use_cache": False}
    with torch.no_grad(), operate(model, Surgery(**edit)):
        out: Tensor = model(input_ids=tokens, attention_mask=keep, **positions).last_hidden_state
    return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "side"), [("tiny-bert", "right"), ("tiny-llama", "right"), ("tiny-llama", "left")])
def test_padding_stays_hidden(name: str, side: str, implementation: str, edit: str) -> None:
    if name == "tiny-llama" and implementation == "eager" and edit in SEES_INSIDE_SCORES_ONLY:
        with pytest.raises(UnsupportedOperationError, match="cannot be made visible"):
            run(family(name, implementation), ids(), torch.ones_like(ids()), EDITS[edit])
        return
    model = family(name, implementation)
    tokens = ids(2, LENGTHS[0])
    places = [slice(0, n) if side == "right" else slice(LENGTHS[0] - n, LENGTHS[0]) for n in LENGTHS]
    keep = torch.zeros_like(tokens)
    for row, place in enumerate(places):
        keep[row, place] = 1
    padded = run(model, tokens, keep, EDITS[edit])
    for row, place in enumerate(places):
        alone = tokens[row : row + 1, place]
        want = run(model, alone, torch.ones_like(alone), EDITS[edit])
        assert float((padded[row : row + 1, place] - want).abs().max()) <= 1e-12 * float(want.abs().max())
