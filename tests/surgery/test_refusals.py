"""What a model cannot undergo is said before anything runs, with the block and the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rankscope import Surgery
from rankscope.errors import InputError, UnsupportedOperationError
from rankscope.masks import parse_mask
from rankscope.models.stream import Stream
from rankscope.models.view import BlockCall, BlockPlan, Carry, ModelView, Stack
from rankscope.surgery.graft import Graft
from rankscope.surgery.operating import _check_places, operate
from rankscope.surgery.operation import Operation
from rankscope.surgery.refusals import check_operable
from tests.own_models import GPT, ids

PLAIN = BlockPlan(("attention", "mlp"), ("attention",), has_norm=True)
UNSEEN = BlockPlan(("attention", "mlp"), (), has_norm=True)
CROSS_ONLY = BlockPlan(("cross_attention", "mlp"), ("cross_attention",))
BARE = BlockPlan((None,), ("attention",))
MIXER = BlockPlan(("mixer",), ())
ATTENTION_ALONE = BlockPlan(("attention",), ("attention",))
PARALLEL = BlockPlan(("both",), ("attention",), has_norm=True, parallel_mlp="mlp")
HIDDEN_MLP = BlockPlan(("both",), ("attention",))
JOINED = BlockPlan(("attention", "mlp"), ("attention",), joins=(False, True))


def view(*plans: BlockPlan, inline: bool = False, name: str | None = None) -> ModelView:
    calls = [BlockCall("model.layers", 0, plans)] if inline else []
    calls = calls or [BlockCall(f"layers.{i}", i, (plan,)) for i, plan in enumerate(plans)]
    return ModelView(nn.Module(), (Stack(name, tuple(calls), Stream("batch tokens dim"), None),))


def carried(*plans: BlockPlan) -> ModelView:
    """A long skip around the first two blocks, and a norm written out in the second."""
    plain = view(*plans).stacks[0]
    skip, norm = Carry("", "torch.add", 0, 1), Carry("layers.1", "torch.mul", 1, 1)
    return ModelView(nn.Module(), (replace(plain, carries=(skip,)), replace(plain, name="other", own_norms=(norm,))))


FINE: tuple[tuple[ModelView, dict[str, Any]], ...] = (
    (view(PLAIN, PLAIN), {"attention_skip": 0.5, "mlp": "drop", "norm": "rms", "temperature": 2.0}),
    (view(UNSEEN), {"attention_skip": 0.0, "mlp": "drop", "norm": "identity"}),
    (view(UNSEEN, PLAIN), {"temperature": 2.0, "layers": frozenset({1})}),
    (view(BARE, PLAIN), {"attention_skip": 0.0, "mlp_skip": 0.0}),
    (carried(PLAIN, PLAIN, PLAIN), {"temperature": 2.0, "mlp": "drop"}),
    (carried(PLAIN, PLAIN, PLAIN), {"norm": "rms", "layers": frozenset({0, 2})}),
    (carried(PLAIN, PLAIN, PLAIN), {"attention_skip": 0.0, "layers": frozenset({2})}),
    (view(MIXER, PLAIN), {"mlp": "drop"}),
    (view(MIXER, PARALLEL), {"mlp": "drop"}),
    (view(PARALLEL), {"attention_skip": 0.5, "mlp_skip": 0.5, "mlp": "drop"}),
    (view(JOINED), {"mlp": "drop"}),
    (view(HIDDEN_MLP), {"heads": frozenset({0})}),
    (view(BARE, PLAIN), {"norm": "scale"}),
    (view(PLAIN, PLAIN, inline=True), {"norm": "rms", "mlp": "drop"}),
    (view(PLAIN, PLAIN, inline=True), {"attention_skip": 0.0, "layers": frozenset({1})}),
    (view(PLAIN, inline=True), {"norm": "rms", "layers": frozenset({0})}),
    (view(PARALLEL, PARALLEL, inline=True), {"attention_skip": 0.0, "mlp_skip": 0.0}),
    (view(PLAIN, name="encoder"), {"stack": "encoder", "norm": "rms"}),
)
REFUSED: tuple[tuple[ModelView, dict[str, Any], str], ...] = (
    (carried(PLAIN, PLAIN), {"mlp_skip": 0.5}, "Found at blocks 0 to 1: torch.add in the model itself"),
    (carried(PLAIN, PLAIN), {"attention_skip": 0.0, "layers": frozenset({1})}, "blocks 0 to 1: torch.add in the model"),
    (
        carried(PLAIN, PLAIN),
        {"norm": "identity"},
        "norm='identity' would leave .* other block 1: torch.mul in layers.1",
    ),
    (view(PLAIN, UNSEEN), {"temperature": 2.0}, "^block 1: its attention probabilities cannot be seen"),
    (view(PLAIN, UNSEEN), {"mask": parse_mask("causal")}, "^block 1: its attention probabilities"),
    (view(CROSS_ONLY, name="decoder"), {"attention_scale": 2.0}, "^decoder block 0: its attention probabilities"),
    (view(PARALLEL), {"attention_skip": 0.5}, "one skip, so attention_skip and mlp_skip must agree"),
    (view(JOINED), {"mlp_skip": 0.5}, "one skip, so attention_skip and mlp_skip must agree"),
    (view(PLAIN, HIDDEN_MLP), {"mlp": "drop"}, "^block 1: the MLP joins the attention branch in a way that was not"),
    (view(PLAIN, ATTENTION_ALONE), {"mlp": "drop"}, "^block 1 adds no MLP to the stream"),
    (view(MIXER), {"mlp": "drop"}, "no block meant adds an MLP"),
    (
        view(BARE, BARE),
        {"attention_skip": 0.0, "mlp_skip": 0.0},
        "would change nothing: block 0 to block 1 have no skip",
    ),
    (view(BARE), {"attention_skip": 0.0, "temperature": 2.0}, "would change nothing: block 0 have no skip"),
    (view(BARE), {"attention_skip": 0.0}, "would change nothing: block 0 have no skip"),
    (view(ATTENTION_ALONE), {"mlp_skip": 0.5}, "would change nothing: block 0 have no skip"),
    (view(BARE), {"attention_skip": 0.5, "mlp_skip": 0.5}, "^block 0 has no skip to scale"),
    (view(BARE), {"mlp_skip": 0.5}, "^block 0 has no skip to scale"),
    (view(BARE, MIXER), {"norm": "rms"}, "^norm='rms': no block meant has a norm"),
    (view(BARE, PLAIN), {"norm": "rms", "layers": frozenset({0})}, "no block meant has a norm"),
    (
        view(PLAIN, PLAIN, inline=True),
        {"norm": "rms", "layers": frozenset({0})},
        "model.layers holds 2 blocks in one call, and which of them a norm belongs to cannot be told",
    ),
    (view(PARALLEL, PARALLEL, inline=True), {"mlp": "drop"}, "2 parallel blocks in one call, and their MLPs cannot"),
)
MISPLACED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"stack": "text"}, "stack='text': this model has encoder"),
    ({"layers": frozenset({1, 2, 5})}, r"layers=\[2, 5\]: this model has blocks 0 to 1"),
)


@pytest.mark.parametrize(("model", "operation"), FINE)
def test_what_can_be_done_is_not_refused(model: ModelView, operation: dict[str, Any]) -> None:
    check_operable(Operation(**operation), model)


@pytest.mark.parametrize(("model", "operation", "reason"), REFUSED)
def test_what_cannot_be_done_is_refused(model: ModelView, operation: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedOperationError, match=reason):
        check_operable(Operation(**operation), model)


@pytest.mark.parametrize(("operation", "reason"), MISPLACED)
def test_a_place_that_is_not_there_is_refused(operation: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        check_operable(Operation(**operation), view(PLAIN, PLAIN, name="encoder"))


def touching(*places: str) -> Graft:
    graft = Graft()
    graft.touches = frozenset(places)  # type: ignore[misc, assignment]
    return graft


def test_a_graft_needs_a_place_to_take_hold() -> None:
    _check_places(touching("values", "scores", "probs", "adds", "norms", "reads"), view(PLAIN, PLAIN))
    _check_places(touching("adds"), view(PLAIN, PLAIN, inline=True))
    _check_places(touching("adds"), view(UNSEEN))
    _check_places(touching("values"), view(BARE))
    for places, model, reason in (
        (("values", "adds"), view(PLAIN, UNSEEN), "^block 1: its attention probabilities cannot be seen"),
        (("probs",), view(CROSS_ONLY, name="decoder"), "^decoder block 0: its attention probabilities"),
        (("adds",), view(PLAIN, BARE), "^block 1 has no skip onto which a branch is added"),
        (("norms", "reads"), view(PLAIN, MIXER), "^block 1 has no norm that could be changed"),
        (("reads",), view(PLAIN, PLAIN, inline=True), "several blocks in one module call"),
        (("adds",), carried(PLAIN, PLAIN), "what is put at the skips would leave in place"),
        (("norms",), carried(PLAIN, PLAIN), "What is put at the norms would leave norms in place"),
    ):
        with pytest.raises(UnsupportedOperationError, match=reason):
            _check_places(touching(*places), model)


def test_a_head_that_is_not_there_is_named_when_the_model_runs() -> None:
    torch.manual_seed(0)
    model = GPT().eval()
    with (
        operate(model, Surgery(heads=[1, 4, 9]), inputs=ids()),
        pytest.raises(UnsupportedOperationError, match=r"heads=\[4, 9\]: the block has heads 0 to 3\."),
    ):
        model(ids())
