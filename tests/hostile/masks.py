"""Every way to tell a model which tokens are padding: names, polarities, additive scores, lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tests.hostile.case import ALL, READS, case
from tests.hostile.parts import TOKENS, Attention, Block, Net, ids
from tests.hostile.twin import Cut, Twin

CORE = {"doctor", "measure", "ablate"}
put = partial(case, core=CORE)

LENGTHS = torch.tensor([4, TOKENS])
"""The first sequence is padded."""


def content() -> Tensor:
    return torch.arange(TOKENS)[None, :] < LENGTHS[:, None]


class Masked(Net):
    """Reads ``given`` as its subclass says: ``pads`` turns it into True where a token is padding."""

    def pads(self, given: Tensor) -> Tensor:
        raise NotImplementedError

    def run(self, ids: Tensor, given: Tensor) -> Tensor:
        x, hidden = self.start(ids), self.pads(given)[:, None, None, :]
        for block in self.blocks:
            x = block(x, hidden)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor, **given: Tensor) -> Twin:
        """By the lengths alone, whatever the argument is called and means."""
        x, states = self.start_twin(ids), []
        hidden = (torch.arange(ids.shape[1])[None, :] >= LENGTHS[: len(ids), None])[:, None, None, :]
        for layer, block in enumerate(self.blocks):
            x = block.twin(x, cut.at(layer), hidden)
            states.append(x)
        return Twin(self.close_twin(x), states, ~hidden[:, 0, 0])


class AttentionMask(Masked):
    def pads(self, given: Tensor) -> Tensor:
        return given == 0

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.run(ids, attention_mask)


class SrcKeyPaddingMask(Masked):
    def pads(self, given: Tensor) -> Tensor:
        return given

    def forward(self, ids: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        return self.run(ids, src_key_padding_mask)


class KeyPaddingMask(SrcKeyPaddingMask):
    def forward(self, ids: Tensor, key_padding_mask: Tensor) -> Tensor:
        return self.run(ids, key_padding_mask)


class PaddingMask(SrcKeyPaddingMask):
    def forward(self, ids: Tensor, padding_mask: Tensor) -> Tensor:
        return self.run(ids, padding_mask)


class PaddingMaskKeeps(AttentionMask):
    """The same name, and True means content."""

    def forward(self, ids: Tensor, padding_mask: Tensor) -> Tensor:
        return self.run(ids, padding_mask)


class MaskKeeps(AttentionMask):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.run(ids, mask)


class MaskDrops(SrcKeyPaddingMask):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.run(ids, mask)


class AdditiveMask(Masked):
    """Scores that are added, (batch, 1, 1, tokens)."""

    def pads(self, given: Tensor) -> Tensor:
        return given[:, 0, 0] < -1

    def forward(self, ids: Tensor, attn_mask: Tensor) -> Tensor:
        return self.run(ids, attn_mask)


class PairMask(Masked):
    """One entry for every query and key."""

    def pads(self, given: Tensor) -> Tensor:
        return ~given[:, 0]

    def forward(self, ids: Tensor, attn_mask: Tensor) -> Tensor:
        return self.run(ids, attn_mask)


class Lengths(Masked):
    def pads(self, given: Tensor) -> Tensor:
        return torch.arange(TOKENS)[None, :] >= given[:, None]

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.run(ids, lengths)


class OddName(SrcKeyPaddingMask):
    """A name nobody could know."""

    def forward(self, ids: Tensor, ignore: Tensor) -> Tensor:
        return self.run(ids, ignore)


class PaddingId(Masked):
    """No argument at all: the id 0 is padding. Without a word from the user, every token counts."""

    def twin(self, cut: Cut, ids: Tensor, **given: Tensor) -> Twin:
        told = super().twin(cut, ids)
        return told._replace(counts=None, told=told.counts)

    def pads(self, given: Tensor) -> Tensor:
        return given == 0

    def forward(self, ids: Tensor) -> Tensor:
        return self.run(ids, ids)


class NoPadding(Masked):
    """A mask that hides nothing."""

    def pads(self, given: Tensor) -> Tensor:
        return given

    def forward(self, ids: Tensor, key_padding_mask: Tensor) -> Tensor:
        return self.run(ids, key_padding_mask)

    def twin(self, cut: Cut, ids: Tensor, **given: Tensor) -> Twin:
        return Net.twin(self, cut, ids)


class _Causal(Block):
    def make_attention(self) -> Attention:
        return Attention(causal=True)


class CausalAndPadded(AttentionMask):
    def __init__(self) -> None:
        super().__init__(_Causal)


def given(name: str, values: Callable[[], Tensor]) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"ids": ids(), name: values()}


def padded_ids() -> dict[str, Tensor]:
    return {"ids": (ids().clamp(min=1)).masked_fill(~content(), 0)}


def padding() -> Tensor:
    return ~content()


def additive() -> Tensor:
    return torch.zeros(2, 1, 1, TOKENS).masked_fill(padding()[:, None, None, :], -1e9)


NAMED = {"padding": padding}

put("attention_mask", AttentionMask, inputs=given("attention_mask", lambda: content().long()))
put("attention_mask_bool", AttentionMask, inputs=given("attention_mask", content))
put("attention_mask_float", AttentionMask, inputs=given("attention_mask", lambda: content().double()))
put("src_key_padding_mask", SrcKeyPaddingMask, inputs=given("src_key_padding_mask", padding), declared=NAMED)
put("key_padding_mask", KeyPaddingMask, inputs=given("key_padding_mask", padding), declared=NAMED)
put("padding_mask", PaddingMask, inputs=given("padding_mask", padding), declared={"padding": "padding_mask=1"})
put("padding_mask_keeps", PaddingMaskKeeps, equal=frozenset(), inputs=given("padding_mask", content), declared=NAMED)
put("mask_keeps", MaskKeeps, equal=frozenset(), inputs=given("mask", content), declared={"padding": "mask=0"})
put("mask_drops", MaskDrops, equal=frozenset(), inputs=given("mask", padding), declared={"padding": "mask=1"})
put("additive_mask", AdditiveMask, equal=frozenset(), inputs=given("attn_mask", additive), declared=NAMED)
put(
    "pair_mask",
    PairMask,
    equal=frozenset(),
    inputs=given("attn_mask", lambda: content()[:, None, :].expand(-1, TOKENS, -1)),
    declared=NAMED,
)
put("lengths", Lengths, equal=frozenset(), inputs=given("lengths", lambda: LENGTHS), declared=NAMED)
put("odd_name", OddName, equal=frozenset(), inputs=given("ignore", padding), declared=NAMED)
put("padding_id", PaddingId, inputs=padded_ids, declared=NAMED)
put(
    "no_padding",
    NoPadding,
    equal=ALL,
    inputs=given("key_padding_mask", lambda: torch.zeros(2, TOKENS, dtype=torch.bool)),
)
put("causal_and_padded", CausalAndPadded, equal=READS, inputs=given("attention_mask", content))
