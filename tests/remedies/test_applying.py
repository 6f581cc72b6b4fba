"""``applied`` as a context: what is yielded, what stays, what is refused, what is left behind."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from rankscope import Surgery
from rankscope.errors import InputError, UnknownNameError, UnsupportedOperationError
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.remedies import REMEDIES, applied
from rankscope.surgery.operating import operate
from rankscope.surgery.session import operations_on
from tests.own_models import checkpointed
from tests.surgery.written_out import build


def bert():
    loaded = load("init:tiny-bert", dtype="float64")
    return loaded.model, prepare_inputs(loaded, None, sequences=2, tokens=12, batch=2)[0]


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="centred_attention"), applied(bert()[0], "centered_attention"):
        pass


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("stronger_skip", {"strength": float("nan")}, "finite"),
        ("pre_norm", {"strength": 2.0}, "applied whole"),
        ("pre_norm", {"learnable": True}, "no numbers that could be learned"),
    ],
)
def test_a_wrong_strength_is_refused(name: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words), applied(bert()[0], name, **options):
        pass


@pytest.mark.parametrize("name", [name for name in REMEDIES if REMEDIES[name].learnable])
def test_what_is_learned_stays_with_the_treatment_and_leaves_the_model_alone(name: str) -> None:
    model, batch = bert()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    bare = batch.run(model).last_hidden_state
    with applied(model, name, learnable=True) as given:
        batch.run(model)
        parameters = list(given.parameters())
        assert parameters
        target = torch.randn(bare.shape, dtype=bare.dtype, generator=torch.Generator().manual_seed(0))
        optimiser = torch.optim.SGD(parameters, lr=0.5)
        losses = []
        for _ in range(3):
            optimiser.zero_grad()
            loss = (batch.run(model).last_hidden_state - target).square().mean()
            loss.backward()
            assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in parameters)
            losses.append(float(loss.detach()))
            optimiser.step()
        learned = batch.run(model).last_hidden_state
    assert losses[-1] < losses[0]
    assert torch.equal(batch.run(model).last_hidden_state, bare)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with applied(model, given) as again:
        assert again is given
        assert torch.equal(batch.run(model).last_hidden_state, learned)
    with pytest.raises(InputError, match="already prepared"), applied(model, given, strength=1.0):
        pass


def test_nothing_is_left_behind_after_an_error() -> None:
    model, batch = bert()

    def body() -> None:
        batch.run(model)
        assert len(operations_on(model)) == 3
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), applied(model, "deepnorm"), applied(model, "neutreno"):
        body()
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 0
    assert not _get_current_function_mode_stack()
    assert operations_on(model) == ()


def test_first_values_are_not_kept_after_a_pass() -> None:
    model, batch = bert()
    with applied(model, "neutreno") as given:
        batch.run(model)
        assert given.grafts[0]._first == {}


def test_a_remedy_of_a_network_without_skips() -> None:
    """Without skips or MLPs, attention as the identity leaves tokens to the values alone."""
    model = build("pre", "sdpa", False, 2)
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    kept = {"skip": 0.0, "mlp": "drop", "norm": "identity"}
    with torch.no_grad(), operate(model, Surgery(**kept), inputs=x), applied(model, "value_skipinit"):
        got = model(x)
        want = x
        for block in model.blocks:
            weights = block.attention.weights
            value = want @ weights.in_proj_weight[24:].T + weights.in_proj_bias[24:]
            want = weights.out_proj(value)
        assert torch.allclose(got, model.norm(want), rtol=1e-11, atol=0)


def test_gradient_checkpointing_is_refused_where_first_values_are_needed() -> None:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=16,
        vocab_size=20, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaModel(config).train()
    checkpointed(model)
    ids = torch.arange(12).reshape(2, 6)
    with applied(model, "neutreno", inputs=ids), pytest.raises(UnsupportedOperationError, match="checkpointing"):
        model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
