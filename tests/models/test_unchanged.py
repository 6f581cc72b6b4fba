"""What was proven about a model is forgotten when the model changes, in whatever way."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankscope import Surgery
from rankscope.errors import UnsupportedOperationError
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.models.unchanged import Snapshot
from rankscope.surgery import operate
from rankscope.surgery.session import structure_of

MIXES = False
IDS = torch.arange(24).reshape(2, 12) % 10


def shifted(x: Tensor) -> Tensor:
    return x.roll(1, 1) if MIXES else x


class Second(nn.Module):
    """An MLP, or a mixer of tokens if one of many switches is on."""

    kind_mixes = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)
        self.mixes = False
        self.settings = {"deep": [{"mixes": False}]}
        self.gate = nn.Parameter(torch.zeros(1))
        self.plain = torch.zeros(1)

    def is_on(self) -> bool:
        return self.kind_mixes

    def forward(self, x: Tensor) -> Tensor:
        on = self.mixes or self.is_on() or self.settings["deep"][0]["mixes"] or bool(self.gate > 0)
        x = x.roll(1, 1) if on or bool(self.plain > 0) else shifted(x)
        return self.b(torch.relu(self.a(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
        self.second = Second()
        self.leaks = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        y = x + self.attn(h, h, h, need_weights=False)[0]
        y = y + self.second(self.n2(y))
        return torch.from_numpy(x.numpy() + y.numpy()) if self.leaks else y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.positions = nn.Embedding(10, 16), nn.Parameter(torch.randn(12, 16))
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.batch_first = True

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids if self.batch_first else ids.T
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return x if self.batch_first else x.transpose(0, 1)


def by_attribute(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.layers[0].second.mixes = True


def by_settings(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.layers[0].second.settings["deep"][0]["mixes"] = True


def by_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Second, "kind_mixes", True)


def by_global(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules[__name__], "MIXES", True)


def by_data(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.layers[0].second.gate.data.fill_(1.0)


def by_new_data(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.layers[0].second.gate.data = torch.ones(1)


def by_set(model: Any, patch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        model.layers[0].second.gate.set_(torch.ones(1))


def by_plain_tensor(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.layers[0].second.plain.fill_(1.0)


CHANGES: list[Callable[[Any, pytest.MonkeyPatch], None]] = [
    by_attribute,
    by_settings,
    by_class,
    by_global,
    by_data,
    by_new_data,
    by_set,
    by_plain_tensor,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_branch_that_begins_to_mix_is_no_longer_an_mlp(
    change: Callable[[Any, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its role was remembered, so that ``mlp="drop"`` removed a mixer of tokens."""
    model = Net().eval()
    assert [plan.skips for plan in structure_of(model, IDS).stacks[0].plans] == [("attention", "mlp")] * 2
    before = Snapshot(model)
    assert before.fits(model)
    change(model, monkeypatch)
    assert not before.fits(model)
    labels = [plan.skips for plan in structure_of(model, IDS).stacks[0].plans]
    everywhere = change in (by_class, by_global)
    assert labels == [("attention", "mixer"), ("attention", "mixer" if everywhere else "mlp")]


def test_cuts_are_proven_again_after_a_change() -> None:
    """The stacks are the same, and so was the proof: the skip through NumPy stayed."""
    model = Net().eval()
    with torch.no_grad(), operate(model, Surgery(skip=0.0), inputs=IDS):
        model(IDS)
    for layer in model.layers:
        layer.leaks = True
    with pytest.raises(UnsupportedOperationError, match="gets around"), operate(model, Surgery(skip=0.0), inputs=IDS):
        pass


def test_axes_are_found_again_after_a_change() -> None:
    model = Net().eval()
    ids = torch.arange(96).reshape(8, 12) % 10
    assert prepare_inputs(load(model), ids)[0].axis == 0
    model.batch_first = False
    assert prepare_inputs(load(model), ids.T.contiguous())[0].axis == 1


def test_training_does_not_change_the_axes() -> None:
    model = Net().eval()
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(None))
    prepare_inputs(load(model), IDS)
    with torch.no_grad():
        model.positions.add_(0.1)
    count = len(passes)
    prepare_inputs(load(model), IDS)
    assert len(passes) == count


def test_a_model_that_was_only_looked_at_is_freed() -> None:
    """Passes that were observed for the structure wait until it is asked for, and keep no model alive."""
    model = Net().eval()
    prepare_inputs(load(model), IDS)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
