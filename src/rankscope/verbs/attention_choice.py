"""How attention probabilities are gone through: all of a block in memory, or tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rankscope._errors import InputError
from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.attention_view import AttentionView
from rankscope.linalg.blockwise_attention import BlockwiseAttention
from rankscope.stream.attention_calls import AttentionCall

DENSE_BYTES = 1 << 29
"""Without a choice, probabilities of one block that would take more memory than this are gone through by tiles."""

Keep = Callable[[int, int, torch.device], Tensor | None]


@dataclass(frozen=True)
class AttentionChoice:
    """Dense or blockwise.

    Attributes:
        way: None for the one that suits the size.
        passes: walks per head for the largest singular value; None for as many as are affordable.
    """

    way: Literal["dense", "blockwise"] | None = None
    passes: int | None = None

    def view(self, call: AttentionCall, keep: Keep, *, spectrum: bool) -> tuple[AttentionView, torch.dtype]:
        """The reductions of one attention call, and the format its probabilities are in.

        Args:
            call: what was seen.
            keep: which tokens count, by number of sequences and tokens and device.
            spectrum: whether a singular value will be asked for.
        """
        if not self._goes_by_tiles(call):
            probs = call.probs()
            kept = keep(probs.shape[0], probs.shape[-2], probs.device)
            return AttentionMatrix(probs, call.support(), kept), probs.dtype
        assert call.query is not None
        assert call.key is not None
        view = BlockwiseAttention(
            call.query,
            call.key,
            mask=call.mask,
            is_causal=call.is_causal,
            scale=call.scale,
            keep=keep(call.query.shape[0], call.query.shape[2], call.query.device),
            log_sums=call.log_sums,
            spectrum=spectrum,
            passes=self.passes,
        )
        return view, view.dtype

    def _goes_by_tiles(self, call: AttentionCall) -> bool:
        possible = call.weights is None and not call.edits
        if self.way == "blockwise" and not possible:
            why = "surgery edits its probabilities" if call.edits else "it computes all probabilities itself"
            raise InputError(
                f"attention_algorithm='blockwise' needs the queries and keys of a fused kernel, but here {why}. Load "
                "the model with attn_implementation='sdpa', without such surgery, or leave attention_algorithm out."
            )
        return possible and (self.way == "blockwise" or (self.way is None and call.probs_bytes > DENSE_BYTES))


BY_SIZE = AttentionChoice()


def parse_attention_choice(word: str | None) -> AttentionChoice:
    """Read ``"dense"``, ``"blockwise"`` or ``"blockwise:WALKS"``.

    Example:
        >>> parse_attention_choice("blockwise:20").passes
        20
    """
    if word is None:
        return BY_SIZE
    way, colon, number = word.partition(":")
    if way == "dense" and not colon:
        return AttentionChoice("dense")
    if way == "blockwise" and (not colon or (number.isdecimal() and int(number) > 0)):
        return AttentionChoice("blockwise", int(number) if colon else None)
    raise InputError(
        f"attention_algorithm={word!r} is not known. Expected 'dense', 'blockwise', or 'blockwise:20' for 20 walks per "
        "head."
    )
