"""Padding of a caller's own tensors: read as the model reads it, whatever its name, or refused with what to write."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankscope as rs
from rankscope.errors import InputError
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load

LENGTHS = torch.tensor([14, 9, 6, 11])
TOKENS, DIM = 14, 16
IS_CONTENT = torch.arange(TOKENS) < LENGTHS[:, None]


class Mixer(nn.Module):
    """Blocks of one-headed attention over the tokens that ``visible`` allows, with an MLP each."""

    def __init__(self, depth: int = 2, *, causal: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(30, DIM)
        self.blocks = nn.ModuleList(MixerBlock(causal) for _ in range(depth))

    def through(self, x: Tensor, visible: Tensor | None) -> Tensor:
        for block in self.blocks:
            x = block(x, visible)
        return x


class MixerBlock(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.norm, self.causal = nn.LayerNorm(DIM), causal
        self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:
        z = self.norm(x)
        scores = self.query(z) @ self.key(z).transpose(-1, -2) / math.sqrt(DIM)
        if visible is not None:
            scores = scores.masked_fill(~visible[:, None, :], -torch.inf)
        if self.causal:
            scores = scores.masked_fill(~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), -torch.inf)
        x = x + scores.softmax(-1) @ self.value(z)
        return x + self.mlp(x)


class TrueIsContent(Mixer):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.through(self.embedding(ids), mask != 0)


class TrueIsPadding(Mixer):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.through(self.embedding(ids), mask == 0)


class ZeroesPadding(Mixer):
    """Also sets what it gives for padding to zero, as many encoders do."""

    def forward(self, ids: Tensor, pad_mask: Tensor) -> Tensor:
        return self.through(self.embedding(ids), ~pad_mask) * ~pad_mask[..., None]


class ReadsLengths(Mixer):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.through(x, torch.arange(x.shape[1]) < lengths[:, None])


class AddsScores(Mixer):
    def forward(self, x: Tensor, attn_mask: Tensor) -> Tensor:
        return self.through(x, attn_mask[:, 0, 0] > -1)


class Ignores(Mixer):
    """Takes a mask and reads every token all the same."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.through(self.embedding(ids), None)


class Marks(Mixer):
    """Booleans about tokens that are no mask."""

    def forward(self, ids: Tensor, is_question: Tensor) -> Tensor:
        return self.through(self.embedding(ids) + is_question[..., None].float(), None)


class GuessesMasked(Mixer):
    """``mask`` marks tokens that are replaced by a learned vector: they are hidden from nobody."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.through(torch.where(mask[..., None], self.embedding.weight[0], self.embedding(ids)), None)


def ids() -> Tensor:
    drawn = torch.randint(1, 30, (4, TOKENS), generator=torch.Generator().manual_seed(1))
    return torch.where(IS_CONTENT, drawn, 0)


def vectors() -> Tensor:
    return torch.randn(4, TOKENS, DIM, generator=torch.Generator().manual_seed(2)) * IS_CONTENT[..., None]


def additive() -> Tensor:
    return torch.where(IS_CONTENT, 0.0, -torch.inf)[:, None, None]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], str]] = {
    "mask, 1 is content": (TrueIsContent, lambda: {"ids": ids(), "mask": IS_CONTENT.long()}, "mask=0"),
    "mask, True is padding": (TrueIsPadding, lambda: {"ids": ids(), "mask": ~IS_CONTENT}, "mask=1"),
    "mask, 1 is content, causal": (
        lambda: TrueIsContent(causal=True), lambda: {"ids": ids(), "mask": IS_CONTENT.float()}, "mask=0"),
    "pad_mask, output zeroed": (ZeroesPadding, lambda: {"ids": ids(), "pad_mask": ~IS_CONTENT}, "pad_mask=1"),
    "lengths": (ReadsLengths, lambda: {"x": vectors(), "lengths": LENGTHS}, "lengths"),
    "scores that are added": (AddsScores, lambda: {"x": vectors(), "attn_mask": additive()}, "attn_mask"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_item_9_a_mask_is_read_as_the_model_reads_it(case: str) -> None:
    make, given, how = CASES[case]
    model, inputs = make(), given()
    prepared = prepare_inputs(load(model), inputs, batch=2)
    assert prepared.padding == how
    kept = [part.keep for part in prepared if part.keep is not None]
    assert torch.equal(torch.cat(kept), IS_CONTENT)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_item_9_each_sequence_reads_as_it_does_alone(case: str) -> None:
    """The number itself: with padding beside it, and cut to its own length without."""
    make, given, _ = CASES[case]
    model, inputs = make(), given()
    together = rs.measure(
        rs.Model(model, blocks="blocks.*"), inputs, metrics=["relative_residual"], sites=["block.out"]
    )
    assert together.provenance.lengths == tuple(LENGTHS.tolist())
    for row, length in enumerate(LENGTHS.tolist()):
        alone = {
            name: value[row : row + 1]
            if value.ndim == 1
            else value[row : row + 1, ..., :length]
            if name in ("mask", "pad_mask", "attn_mask") or value.dtype is torch.long
            else value[row : row + 1, :length]
            for name, value in inputs.items()
        }
        single = rs.measure(
            rs.Model(model, blocks="blocks.*"), alone, metrics=["relative_residual"], sites=["block.out"]
        )
        rows = together.select(site="block.out").to_pylist()
        found = [entry["value"] for entry in rows if entry["sequence"] == row]
        assert found == pytest.approx(single.table["value"].to_pylist(), rel=1e-5)


def test_item_9_torch_encoder_against_hand() -> None:
    """``nn.TransformerEncoder`` with ``src_key_padding_mask``, against its own layers called one by one."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = vectors()
    run = rs.measure(model, {"src": x, "src_key_padding_mask": ~IS_CONTENT}, metrics=["relative_residual"])
    for number, block in enumerate(model.layers):
        with torch.no_grad():
            x = block(x, src_key_padding_mask=~IS_CONTENT)
        for row in range(4):
            kept = x[row][IS_CONTENT[row]].double()
            expected = float((kept - kept.mean(0)).norm() / kept.norm())
            found = run.select(site="block.out", layer=number)["value"].to_pylist()[row]
            assert found == pytest.approx(expected, rel=1e-5)


REFUSED: dict[str, tuple[type[nn.Module], Callable[[], dict[str, Tensor]], str]] = {
    "ignored by the model": (Ignores, lambda: {"ids": ids(), "mask": IS_CONTENT}, "does not hide them"),
    "tokens to be guessed": (
        GuessesMasked, lambda: {"ids": ids(), "mask": torch.rand(4, TOKENS) < 0.3}, "not at one end"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_item_9_a_mask_that_is_not_understood_is_refused(case: str) -> None:
    make, given, why = REFUSED[case]
    torch.manual_seed(3)
    with pytest.raises(InputError, match=why) as caught:
        rs.measure(make(), given())
    assert "padding='mask=1'" in str(caught.value)


def test_item_9_a_square_mask_is_not_taken_for_padding() -> None:
    class Patterned(Mixer):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.through(x, None)

    x, causal = torch.randn(5, 7, DIM), torch.ones(7, 7).tril().bool()
    found = prepare_inputs(load(Patterned()), {"x": x, "mask": causal}, batch=2)
    assert [part.inputs["mask"].shape for part in found] == [(7, 7)] * 3
    assert all(part.keep is None for part in found)
    with pytest.raises(InputError, match="as many sequences as tokens"):
        prepare_inputs(load(Patterned()), {"x": torch.randn(7, 7, DIM), "mask": causal})


def test_item_9_booleans_that_are_no_mask_are_told() -> None:
    marked = ids() > 15
    prepared = prepare_inputs(load(Marks()), {"ids": ids(), "is_question": marked})
    assert prepared[0].keep is None
    assert prepared.notes == ("is_question was not recognised as a mask of tokens: no token was left out by it",)


def lengths_of(padding: Any, model: nn.Module | None = None) -> tuple[int, ...]:
    run = rs.measure(
        rs.Model(model or Ignores(), blocks="blocks.*"),
        rs.Inputs({"ids": ids(), "mask": IS_CONTENT}, padding=padding),
        metrics=["relative_residual"],
    )
    return run.provenance.lengths


def test_item_9_padding_can_be_said() -> None:
    own = tuple(LENGTHS.tolist())
    assert lengths_of("none") == (TOKENS,) * 4
    assert lengths_of("mask=0") == lengths_of("mask=False") == own
    assert lengths_of(~IS_CONTENT) == lengths_of((~IS_CONTENT).long()) == own
    assert lengths_of("mask", TrueIsContent()) == own
    with pytest.raises(InputError, match="no token in sequence 0"):
        lengths_of("mask=1")


@pytest.mark.parametrize(
    ("padding", "why"),
    [
        ("pads=1", "no tensor called 'pads'"),
        ("ids=1", "neither the shape nor the values of a mask"),
        (torch.zeros(3, TOKENS), r"expected \(4, 14\)"),
        (torch.zeros(4, 3), r"expected \(4, 14\)"),
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
    model = Ignores()
    with rs.operate(
        rs.Model(model, blocks="blocks.*"), rs.Surgery(skip=0.0), inputs={"ids": ids(), "mask": IS_CONTENT}
    ):
        pass


def test_trying_a_mask_leaves_the_model_as_it_was() -> None:
    model = TrueIsContent()
    model.train()
    state = torch.get_rng_state()
    prepare_inputs(load(model), {"ids": ids(), "mask": IS_CONTENT})
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_four_dimensional_mask_of_transformers_is_read() -> None:
    """As generation code passes it: scores to be added, (batch, 1, queries, keys)."""
    loaded = load("init:tiny-llama")
    words = torch.randint(5, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    content = torch.arange(8) < torch.tensor([8, 5])[:, None]
    allowed = content[:, None, None] & torch.ones(8, 8, dtype=torch.bool).tril()
    mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    prepared = prepare_inputs(loaded, {"input_ids": words, "attention_mask": mask})
    assert prepared[0].keep is not None
    assert torch.equal(prepared[0].keep, content)
