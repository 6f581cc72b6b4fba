"""Words to token ids: the model's own tokenizer, or a stable hash of words where a model has none."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rankscope._errors import InputError
from rankscope.models.loading.foreign import refusing

_WORD = re.compile(r"\w+|[^\w\s]")
_NAMED = ("pad", "bos", "eos", "cls", "sep", "mask", "unk", "decoder_start")
_OWN_IDS = "Remove the tokenizer files from the folder to have words hashed to ids, or pass token ids yourself."


class TextEncoder(Protocol):
    """What turns a text into ids and knows which ids are special."""

    @property
    def prefix(self) -> tuple[int, ...]:
        """Ids that start each sequence."""

    @property
    def suffix(self) -> tuple[int, ...]:
        """Ids that end each sequence."""

    @property
    def special(self) -> frozenset[int]:
        """Ids that stand for no piece of text."""

    @property
    def unknown(self) -> int | None:
        """The id of what is not in the vocabulary."""

    def encode(self, text: str) -> list[int]:
        """The ids of ``text`` without prefix and suffix."""


@dataclass(frozen=True)
class HashTokenizer:
    """Words and punctuation marks to ids by a stable hash, for models that come without a tokenizer.

    The id of a word is ``vocabulary[blake2b(word) mod len(vocabulary)]`` over the ids that are not special, the word in
    lower case. The same text gives the same ids on every machine; different words may share an id.

    Example:
        >>> HashTokenizer(vocabulary=(7,), prefix=(1,)).encode("two words")
        [7, 7]
    """

    vocabulary: Sequence[int]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    special: frozenset[int] = frozenset()
    unknown: int | None = None

    def encode(self, text: str) -> list[int]:
        """The ids of the words of ``text``."""
        size = len(self.vocabulary)
        return [self.vocabulary[_digest(word) % size] for word in _WORD.findall(text.casefold())]


@dataclass(frozen=True)
class PretrainedTokens:
    """A transformers tokenizer seen as a :class:`TextEncoder`."""

    tokenizer: Any
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    special: frozenset[int]
    unknown: int | None

    def encode(self, text: str) -> list[int]:
        """The ids of ``text`` by the tokenizer, without special tokens."""
        with refusing(InputError, "The model's tokenizer fails on this text", _OWN_IDS):
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def text_encoder(config: Any, tokenizer: Any | None) -> TextEncoder:
    """The encoder for a model: its tokenizer if it has one, else hashed words over its vocabulary."""
    return hash_tokenizer(config) if tokenizer is None else _wrapped(tokenizer)


def hash_tokenizer(config: Any) -> HashTokenizer:
    """Hashed words over the vocabulary of ``config``, with the start and end tokens that it names.

    [CLS] or else BOS comes first; [SEP], or EOS in an encoder-decoder, comes last. Ids outside the vocabulary are left
    out.
    """
    named = special_ids(config)
    special = frozenset(id_ for ids in named.values() for id_ in ids)
    first = named.get("cls") or named.get("bos") or ()
    last = named.get("sep") or (named.get("eos", ()) if config.is_encoder_decoder else ())
    return HashTokenizer(ordinary_ids(config, special), first[:1], last[:1], special)


def special_ids(config: Any) -> dict[str, tuple[int, ...]]:
    """The special ids a configuration names, by role, those inside the vocabulary."""
    text = config.get_text_config()
    described = {**config.to_dict(), **text.to_dict()}
    size = vocabulary_size(config)
    found: dict[str, tuple[int, ...]] = {}
    for role in _NAMED:
        value = described.get(f"{role}_token_id")
        ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        kept = tuple(id_ for id_ in ids if isinstance(id_, int) and 0 <= id_ < size)
        if kept:
            found[role] = kept
    return found


def ordinary_ids(config: Any, special: frozenset[int]) -> Sequence[int]:
    """The ids of the vocabulary that are not special; a range where possible, for large vocabularies."""
    size = vocabulary_size(config)
    inside = [id_ for id_ in special if 0 <= id_ < size]
    if len(inside) == size:
        raise InputError(f"All {size} ids of the vocabulary are special tokens; pass token ids yourself.")
    return [id_ for id_ in range(size) if id_ not in special] if inside else range(size)


def vocabulary_size(config: Any) -> int:
    """The number of token ids of a text model."""
    size = config.get_text_config().to_dict().get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise InputError(f"The {config.model_type} configuration has no vocab_size; pass token ids yourself.")
    return size


def _wrapped(tokenizer: Any) -> PretrainedTokens:
    """Prefix and suffix are read off an encoded word: whatever surrounds its own ids."""
    with refusing(InputError, "The model's tokenizer cannot be used", _OWN_IDS):
        inner = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        whole = list(tokenizer("a")["input_ids"])
        unknown = tokenizer.unk_token_id
        special = frozenset(int(id_) for id_ in tokenizer.all_special_ids)
    starts = [i for i in range(len(whole) - len(inner) + 1) if whole[i : i + len(inner)] == inner]
    start = starts[0] if starts and inner else 0
    end = start + len(inner) if starts else len(whole)
    return PretrainedTokens(tokenizer, tuple(whole[:start]), tuple(whole[end:]), special, unknown)


def _digest(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")
