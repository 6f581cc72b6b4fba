"""Every remedy on families of every kind: valid, differentiable, restored, or refused with a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope.errors import UnsupportedOperationError
from rankscope.models.inputs import Batch, prepare_inputs
from rankscope.models.loading import load
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.view import ModelView
from rankscope.remedies import REMEDIES, applied
from rankscope.stream.frames import tensors_in
from rankscope.stream.viewing import known_view, view_of
from rankscope.surgery.operating import operate
from tests.loops import case, unchanged

# Post-norm, one shared block, pre-norm, grouped heads, fused projections, parallel, two stacks, images, no attention.
FAMILIES = (
    "tiny-bert", "tiny-albert", "tiny-distilbert", "tiny-llama", "tiny-gpt2", "tiny-gpt-neox", "tiny-t5", "tiny-bart",
    "tiny-vit", "tiny-gemma2", "tiny-bloom", "tiny-gpt-oss", "tiny-xlnet", "tiny-mamba",
)  # fmt: skip
ONLY_FLOAT32 = {"tiny-xlnet"}
POST_NORM = {"tiny-bert", "tiny-albert", "tiny-distilbert", "tiny-bart", "tiny-xlnet"}
WITHOUT_ATTENTION = {"tiny-mamba"}
# A sink, one product by einsum, one fused with a bias, scores through a tanh.
UNSEEN_QUERIES = {"tiny-gpt-oss", "tiny-xlnet", "tiny-bloom", "tiny-gemma2"}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[str, torch.nn.Module, Batch, ModelView]:
    name = request.param
    with quiet_transformers():
        loaded = load(f"init:{name}", dtype=torch.float32 if name in ONLY_FLOAT32 else torch.float64)
        batch = prepare_inputs(loaded, None, sequences=2, tokens=10, batch=2)[0]
        return name, loaded.model, batch, view_of(loaded.model, batch)


def run(model: torch.nn.Module, batch: Batch) -> list[Tensor]:
    with quiet_transformers():
        return [t for t in tensors_in(batch.run(model), depth=4) if t.is_floating_point()]


@pytest.mark.sampled(4)
def test_a_remedy_is_valid_and_reversible_or_refused(family) -> None:
    kind, model, batch, view = family
    with torch.no_grad():
        bare = run(model, batch)
    for name in REMEDIES:
        with case(name), unchanged(model):
            treated, refusal = attempt(model, batch, view, name)
            with torch.no_grad():
                after = run(model, batch)
            assert all(torch.equal(a, b) for a, b in zip(after, bare, strict=True))
            if refusal is not None:
                assert len(refusal.split()) > 6
                assert not must_be_possible(kind, name), refusal
                continue
            assert [t.shape for t in treated] == [t.shape for t in bare]
            assert all(bool(t.isfinite().all()) for t in treated)
            gradients = torch.autograd.grad(treated[0].square().sum(), list(model.parameters()), allow_unused=True)
            assert any(g is not None and bool(g.any()) for g in gradients)
            assert all(bool(g.isfinite().all()) for g in gradients if g is not None)


def attempt(model: torch.nn.Module, batch: Batch, view: ModelView, name: str) -> tuple[list[Tensor], str | None]:
    """What the treated model gives, or why it cannot be treated."""
    try:
        with applied(model, name, view=view):
            return run(model, batch), None
    except UnsupportedOperationError as error:
        return [], str(error)


def must_be_possible(kind: str, name: str) -> bool:
    """What is refused is refused for a reason that is written down here."""
    needs = REMEDIES[name].needs
    if "post-norm" in needs and kind not in POST_NORM:
        return False
    if "attention" in needs and kind in WITHOUT_ATTENTION:
        return False
    if name == "qk_norm" and kind in UNSEEN_QUERIES:
        return False
    if kind == "tiny-mamba":
        return name in ("residual_scale", "skipinit", "stronger_skip")
    if kind == "tiny-gpt-oss":  # a sink beside the keys
        return "attention" not in needs
    if kind == "tiny-xlnet":  # products by einsum; two streams
        return name != "neutreno"
    return True


def test_the_neutral_strength_changes_nothing(family) -> None:
    _, model, batch, view = family
    neutral = {name: remedy.neutral for name, remedy in REMEDIES.items() if remedy.neutral is not None}
    with torch.no_grad():
        bare = run(model, batch)
        scale = max(float(t.abs().max()) for t in bare)
        bound = 1e-4 if bare[0].dtype is torch.float32 else 1e-12
        for name, strength in neutral.items():
            try:
                with applied(model, name, view=view, strength=strength):
                    treated = run(model, batch)
            except UnsupportedOperationError:
                continue  # see the test above
            for a, b in zip(treated, bare, strict=True):
                assert float((a - b).abs().max()) <= bound * scale, name


def pairs_under_remedies(model: torch.nn.Module, ids: Tensor, other: Tensor, **given: Tensor) -> Iterator[Any]:
    """Name of a remedy and the last states on both inputs, for each one that is not refused."""
    with operate(model, inputs={"input_ids": ids, **given}):  # to find its structure, once
        view = known_view(model)
    refused = 0
    for name in REMEDIES:
        try:
            with torch.no_grad(), applied(model, name, view=view):
                yield name, *(model(input_ids=x, use_cache=False, **given).last_hidden_state for x in (ids, other))
        except UnsupportedOperationError:
            refused += 1
    assert refused <= len(REMEDIES) // 4


def test_a_remedy_keeps_a_causal_model_causal() -> None:
    ids = torch.arange(20).reshape(2, 10) % 17
    changed = ids.clone()
    changed[:, -1] += 1
    for name, first, second in pairs_under_remedies(load("init:tiny-llama", dtype=torch.float64).model, ids, changed):
        assert torch.equal(first[:, :-1], second[:, :-1]), name
        assert not torch.equal(first[:, -1], second[:, -1]), name


def test_padding_does_not_reach_tokens_that_count() -> None:
    ids = torch.arange(16).reshape(2, 8) % 13 + 3
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    other = torch.where(mask.bool(), ids, ids + 4)
    model = load("init:tiny-bert", dtype=torch.float64).model
    for name, *states in pairs_under_remedies(model, ids, other, attention_mask=mask):
        first, second = (state[mask.bool()] for state in states)
        assert float((first - second).abs().max()) < 1e-12 * float(first.abs().max()), name
