"""The budget of ``decompose`` against the bytes of tensors that are really alive."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2Model

from rankscope.errors import InputError
from rankscope.ext.paths.decompose.run import decompose
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.stream.viewing import view_of
from tests.ext.paths.live_bytes import LiveBytes

GIB = 2.0**30


@pytest.fixture(scope="module")
def model() -> GPT2Model:
    torch.manual_seed(0)
    return GPT2Model(
        GPT2Config(n_layer=8, n_embd=64, n_head=4, n_positions=96, vocab_size=50, bos_token_id=0, eos_token_id=0)
    ).eval()


def least_budget(model: GPT2Model, ids: torch.Tensor, options: dict[str, Any]) -> float:
    """What the refusal says one sequence needs, a little rounded up."""
    with pytest.raises(InputError, match="needs") as refused:
        decompose(model, ids, paths_memory=1024, **options)
    found = re.search(r"needs ([0-9.e+-]+) GiB", str(refused.value))
    assert found is not None
    return 1.01 * float(found[1])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="lengths"),
        pytest.param({"origins": True}, id="origins", marks=pytest.mark.slow),
        pytest.param({"marginals": ["heads", "layers", "pairs"]}, id="marginals", marks=pytest.mark.slow),
        pytest.param({"convention": "linearised"}, id="linearised", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("room", [1.0, pytest.param(3.0, marks=pytest.mark.slow)])
def test_what_is_alive_stays_within_the_budget(model: GPT2Model, options: dict[str, Any], room: float) -> None:
    ids = torch.randint(0, 50, (4, 96), generator=torch.Generator().manual_seed(1))
    budget = room * least_budget(model, ids, options)
    with torch.no_grad(), LiveBytes() as bare:
        model(ids[: max(1, int(room))])
    # The structure is found before anything is planned, on two sequences, and needs no more than that.
    with LiveBytes() as discovery:
        view_of(model, prepare_inputs(load(model), ids)[0])
    with LiveBytes() as live:
        decompose(model, ids, paths_memory=int(budget * GIB), metrics=["relative_residual"], **options)
    assert live.peak <= max(budget * GIB + bare.peak, discovery.peak)
    assert live.peak >= 0.2 * budget * GIB, "the plan asks for far more than is used"
