from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from rankscope.ext.paths.capture import freeze_network
from rankscope.ext.paths.network import FrozenNetwork
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.stream.viewing import undisturbed, view_of


def small_gpt2(layers: int = 3, heads: int = 2, dim: int = 8) -> nn.Module:
    """Biases and gains away from 0 and 1, which would hide a misplaced one."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=dim,
        n_layer=layers,
        n_head=heads,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(3)
    model = GPT2Model(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, dtype=torch.float64)
    return model


def frozen(model: nn.Module, ids: torch.Tensor) -> FrozenNetwork:
    loaded = load(model)
    batch = prepare_inputs(loaded, ids)[0]
    with undisturbed(model):
        view = view_of(model, batch)
        (network,) = freeze_network(view, loaded.config, batch).values()
    return network


@dataclass
class Small:
    model: nn.Module
    ids: torch.Tensor
    network: FrozenNetwork


@pytest.fixture(scope="module")
def small() -> Small:
    model = small_gpt2()
    ids = torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(1))
    return Small(model, ids, frozen(model, ids))
