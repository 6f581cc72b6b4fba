"""Padding of a caller's own tensors: read as the model reads it, whatever its name, or refused with what to write.

That each sequence reads as it does alone is tested in ``tests/hostile``, on the same networks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankscope as rs
from rankscope.errors import InputError
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from tests.hostile.masks import LENGTHS, MaskKeeps, content
from tests.hostile.parts import TOKENS, Net, drawn
from tests.hostile.parts import ids as words
from tests.hostile.suite import CASES

READ = {
    "mask_keeps": "mask=0", "mask_drops": "mask=1", "attention_mask_float": "attention_mask=0",
    "src_key_padding_mask": "src_key_padding_mask=1", "odd_name": "ignore=1", "lengths": "lengths",
    "additive_mask": "attn_mask",
}  # fmt: skip
BOTH = {"ids": words(), "mask": content()}


@pytest.mark.parametrize("name", READ)
def test_item_9_a_mask_is_read_as_the_model_reads_it(name: str) -> None:
    case = CASES[name]
    prepared = prepare_inputs(load(case.model()), case.given())
    assert prepared.padding == READ[name]
    assert torch.equal(prepared[0].keep, content())


def test_item_9_torch_encoder_against_hand() -> None:
    """``nn.TransformerEncoder`` with ``src_key_padding_mask``, against its own layers called one by one."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, TOKENS, 16)
    run = rs.measure(model, {"src": x, "src_key_padding_mask": ~content()}, metrics=["relative_residual"])
    for number, block in enumerate(model.layers):
        with torch.no_grad():
            x = block(x, src_key_padding_mask=~content())
        for row in range(2):
            kept = x[row][content()[row]].double()
            expected = float((kept - kept.mean(0)).norm() / kept.norm())
            found = run.select(site="block.out", layer=number)["value"].to_pylist()[row]
            assert found == pytest.approx(expected, rel=1e-5)


class Ignores(Net):
    """Takes a mask and reads every token all the same."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids)


class GuessesMasked(Net):
    """``mask`` marks tokens that are replaced by a learned vector: they are hidden from nobody."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids.masked_fill(mask, 0))


class Marks(Net):
    """Booleans about tokens that are no mask."""

    def forward(self, ids: Tensor, is_question: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids + is_question)


class Patterned(Net):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids)


def built(kind: type[Net]) -> nn.Module:
    return drawn(kind(), 0)


@pytest.mark.parametrize(
    ("kind", "mask", "why"),
    [
        (Ignores, content(), "does not hide them"),
        (GuessesMasked, torch.tensor([[0, 1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 1]]).bool(), "not at one end"),
    ],
)
def test_item_9_a_mask_that_is_not_understood_is_refused(kind: type[Net], mask: Tensor, why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        rs.measure(built(kind), {"ids": words(), "mask": mask})
    assert "padding='mask=1'" in str(caught.value)


def test_item_9_a_square_mask_is_not_taken_for_padding() -> None:
    model, causal = load(built(Patterned)), torch.ones(7, 7).tril().bool()
    found = prepare_inputs(model, {"ids": words(5, 7), "mask": causal}, batch=2)
    assert [part.inputs["mask"].shape for part in found] == [(7, 7)] * 3
    assert all(part.keep is None for part in found)
    with pytest.raises(InputError, match="as many sequences as tokens"):
        prepare_inputs(model, {"ids": words(7, 7), "mask": causal})


def test_item_9_booleans_that_are_no_mask_are_told() -> None:
    marked = words().clamp(max=38)
    prepared = prepare_inputs(load(built(Marks)), {"ids": marked, "is_question": marked > 15})
    assert prepared[0].keep is None
    assert prepared.notes == ("is_question was not recognised as a mask of tokens: no token was left out by it",)


def lengths_of(padding: Any, kind: type[Net] = Ignores) -> tuple[int, ...]:
    run = rs.measure(built(kind), rs.Inputs(BOTH, padding=padding), metrics=["relative_residual"])
    return run.provenance.lengths


def test_item_9_padding_can_be_said() -> None:
    own = tuple(LENGTHS.tolist())
    assert lengths_of("none") == (TOKENS,) * 2
    assert lengths_of("mask=0") == lengths_of("mask=False") == own
    assert lengths_of(~content()) == lengths_of((~content()).long()) == own
    assert lengths_of("mask", MaskKeeps) == own
    with pytest.raises(InputError, match="no token in sequence 1"):
        lengths_of("mask=1")


@pytest.mark.parametrize(
    ("padding", "why"),
    [
        ("pads=1", "no tensor called 'pads'"),
        ("ids=1", "neither the shape nor the values of a mask"),
        (torch.zeros(1, TOKENS), r"expected \(2, 7\)"),
        (torch.zeros(2, 3), r"expected \(2, 7\)"),
        (True, "padding=True: expected a text or a torch.Tensor"),
        ({"mask": 1}, r"padding=.*: expected a text or a torch.Tensor"),
    ],
)
def test_item_9_padding_that_means_nothing_is_refused(padding: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        lengths_of(padding)


def test_texts_have_no_padding_to_declare() -> None:
    with pytest.raises(InputError, match="texts are padded here"):
        prepare_inputs(load("init:tiny-bert"), ["a b"], padding="mask=0")
    assert prepare_inputs(load("init:tiny-bert"), ["a b", "a"], padding="none").lengths == (2, 1)


def test_operate_needs_no_word_about_a_mask_it_does_not_use() -> None:
    with rs.operate(built(Ignores), rs.Surgery(skip=0.0), inputs=BOTH):
        pass


def test_a_four_dimensional_mask_of_transformers_is_read() -> None:
    """As generation code passes it: scores to be added, (batch, 1, queries, keys)."""
    loaded = load("init:tiny-llama")
    kept = torch.arange(8) < torch.tensor([8, 5])[:, None]
    allowed = kept[:, None, None] & torch.ones(8, 8, dtype=torch.bool).tril()
    mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    prepared = prepare_inputs(loaded, {"input_ids": words(2, 8), "attention_mask": mask})
    assert prepared[0].keep is not None
    assert torch.equal(prepared[0].keep, kept)
