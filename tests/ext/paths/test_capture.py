"""What freezing refuses, and what a linearised MLP is."""

from __future__ import annotations

import pytest
import torch

from rankscope.errors import InputError, UnsupportedConfigError
from rankscope.ext.paths.capture import freeze_network
from rankscope.ext.paths.lengths import LengthSums, length_sums, plan_memory
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.stream.viewing import undisturbed, view_of
from tests.ext.paths.conftest import Small, frozen
from tests.own_models import GPT, ids


def test_a_model_without_head_weights_is_refused() -> None:
    model = GPT("pre")
    batch = prepare_inputs(load(model), ids())[0]
    with undisturbed(model), pytest.raises(UnsupportedConfigError, match="weights of single heads"):
        freeze_network(view_of(model, batch), None, batch)


def test_heads_that_do_not_make_up_the_branch_are_refused() -> None:
    """A hook that bends the attention output stands for anything a family description does not know of."""
    loaded = load("init:tiny-gpt2", dtype="float64")
    batch = prepare_inputs(loaded, ids())[0]
    with undisturbed(loaded.model):
        view = view_of(loaded.model, batch)
        handle = loaded.model.h[1].attn.c_proj.register_forward_hook(lambda _m, _a, out: out + 1e-6 * out.square())
        with pytest.raises(UnsupportedConfigError, match=r"block 1 attention\.out: the sum over heads departs"):
            freeze_network(view, loaded.config, batch)
        handle.remove()


def test_the_linearised_mlp_is_the_jacobian(small: Small) -> None:
    """Against finite differences of the model's own MLP, its norm's scale held."""
    network = frozen(small.model, small.ids, "linearised")
    step = next(step for step in network.steps if step.tokenwise is not None)
    x = network.entry
    for earlier in network.steps[: list(network.steps).index(step)]:
        x = earlier.total(x)
    block = small.model.h[0]
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    scale = (x.var(-1, unbiased=False, keepdim=True) + block.ln_2.eps).rsqrt()
    centred = (direction - direction.mean(-1, keepdim=True)) * scale * block.ln_2.weight
    with torch.no_grad():
        at = block.ln_2(x)
        expected = (block.mlp(at + 1e-6 * centred) - block.mlp(at - 1e-6 * centred)) / 2e-6
        found = step.token_branch(direction[None])[0]
    assert float((found - expected).norm() / expected.norm()) < 1e-8
    assert length_sums(network).error(network.out) < 1e-13


def test_lengths_in_chunks_are_the_same(small: Small) -> None:
    whole = length_sums(small.network)
    for chunk in (1, 2, 3):
        parts = LengthSums(3, chunk=chunk)
        parts.begin(small.network.entry)
        for step in small.network.steps:
            parts.step(step)
        torch.testing.assert_close(parts.by_length, whole.by_length, rtol=1e-13, atol=1e-15)
        assert parts.applications == whole.applications


def test_a_budget_is_kept_or_refused() -> None:
    sizes = {"tokens": 64, "dim": 1600, "depth": 48, "heads": 25, "itemsize": 4}
    stream = 64 * 1600 * 4
    plan = plan_memory(2**30, sequences=8, **sizes)
    held = 49 * stream + 2 * 25 * 64 * 64 * 4 + 8 * stream
    assert plan.sequences * (held + 4 * plan.chunk * stream) <= 2**30
    with pytest.raises(InputError, match="Allow more"):
        plan_memory(2**20, sequences=1, **sizes)
    assert plan_memory(None, sequences=8, **sizes).sequences == 8
