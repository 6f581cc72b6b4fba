"""The small piece of a batch on which structure is found."""

from __future__ import annotations

import torch

from rankscope import Surgery
from rankscope.models.inputs import Batch
from rankscope.stream.viewing import known_view, undisturbed, view_of
from rankscope.surgery import operate
from tests.own_models import GPT, ids
from tests.stream.test_roles import IDS, attention, mlp, net


def test_what_was_found_is_remembered_and_forgotten_with_the_model() -> None:
    model = GPT("pre")
    assert known_view(model) is None
    view = view_of(model, Batch({}, None, 0, 2, (ids(),)))
    assert known_view(model).stacks == view.stacks


def test_running_aside_disturbs_nothing() -> None:
    model = GPT("pre").train()
    model.blocks[1].eval()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with undisturbed(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        torch.rand(5)
    assert torch.equal(torch.rand(1), expected)
    assert model.training
    assert not model.blocks[1].training


def test_a_block_sparse_model_stays_block_sparse() -> None:
    from transformers import BigBirdConfig, BigBirdModel

    import rankscope as rs

    shape = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 2}
    sparse = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
    model = BigBirdModel(BigBirdConfig(vocab_size=100, max_position_embeddings=64, **shape, **sparse)).eval()
    rs.measure(model, ids(2, 64), metrics=["relative_residual"])
    assert model.attention_type == "block_sparse"
    assert {block.attention.attention_type for block in model.encoder.layer} == {"block_sparse"}


def test_under_surgery_the_structure_is_that_of_the_model_as_written_and_remembered() -> None:
    model, passes = net(attention, mlp, ("op", "other")), [0]
    model.register_forward_pre_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    batch = Batch({}, None, 0, 2, (IDS,))
    with operate(model, Surgery(skip=0.0, mlp="drop"), inputs=IDS):
        found, before = view_of(model, batch), passes[0]
        assert view_of(model, batch).stacks == found.stacks
        assert passes[0] == before
    assert view_of(model, batch).stacks == found.stacks
    assert view_of(net(attention, mlp, ("op", "other")), batch).stacks == found.stacks
