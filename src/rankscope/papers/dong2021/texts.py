"""Texts for the figure, cut the way the authors' tokenizers cut theirs as far as that changes the numbers.

The published curves read wiki_bio, where punctuation is set apart by spaces. WordPiece (BERT) makes one token of such a
mark; SentencePiece (ALBERT, XLNet) makes two, a word boundary and the mark, so that one and the same token fills a
tenth of every sequence. XLNet has neither position embeddings nor a norm before its first block, and shows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from rankscope.models.inputs import Prepared, prepare_inputs
from rankscope.models.inputs.rows import HashTokenizer, hash_tokenizer, read_text, rows_from_cycle
from rankscope.models.inputs.text import sample_text
from rankscope.models.loading import LoadedModel

Cut = Literal["words", "pieces"]
_MARK = re.compile(r"([^\w\s])")
_BOUNDARY = "wordboundary"


@dataclass(frozen=True)
class PieceTokenizer:
    """Hashed words, with a boundary token before every punctuation mark.

    Example:
        >>> PieceTokenizer(HashTokenizer(range(9))).encode("a,") == HashTokenizer(range(9)).encode("a wordboundary ,")
        True
    """

    words: HashTokenizer

    @property
    def prefix(self) -> tuple[int, ...]:
        """As for words."""
        return self.words.prefix

    @property
    def suffix(self) -> tuple[int, ...]:
        """As for words."""
        return self.words.suffix

    @property
    def special(self) -> frozenset[int]:
        """As for words."""
        return self.words.special

    @property
    def unknown(self) -> int | None:
        """As for words."""
        return self.words.unknown

    def encode(self, text: str) -> list[int]:
        """Ids of words, boundaries and marks."""
        return self.words.encode(_MARK.sub(rf" {_BOUNDARY} \1 ", text))


def text_for(
    loaded: LoadedModel, cut: Cut, source: Path | None, *, sequences: int, tokens: int, batch: int = 8
) -> Prepared:
    """Full sequences of the built-in sample, or of a file, for a model without a tokenizer."""
    words = hash_tokenizer(loaded.config)
    encoder = words if cut == "words" else PieceTokenizer(words)
    text = sample_text() if source is None else read_text(source)
    rows, _ = rows_from_cycle(text, encoder, sequences, tokens, pad=0)
    return prepare_inputs(loaded, {"input_ids": rows.ids}, batch=batch)


def repeat_share(prepared: Prepared) -> float:
    """Mean over sequences of the chance that two tokens drawn from one sequence are the same."""
    shares = []
    for part in prepared:
        for row in part.inputs["input_ids"]:
            counts = torch.unique(row, return_counts=True)[1].double()
            shares.append(float((counts / counts.sum()).square().sum()))
    return sum(shares) / len(shares)
