"""What freezing refuses."""

from __future__ import annotations

import pytest

from rankscope.errors import UnsupportedConfigError
from rankscope.ext.paths.capture import freeze_network
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.stream.viewing import undisturbed, view_of
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
