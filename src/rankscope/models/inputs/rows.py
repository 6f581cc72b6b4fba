"""Turns texts into rows of token ids of equal length, and marks the tokens that count."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rankscope._files import open_regular
from rankscope.errors import InputError
from rankscope.models.inputs.record import TokensPolicy
from rankscope.models.loading.foreign import refusing

_WORD = re.compile(r"\w+|[^\w\s]")
_NAMED = ("pad", "bos", "eos", "cls", "sep", "mask", "unk", "decoder_start")
_OWN_IDS = "Remove the tokenizer files from the folder to have words hashed to ids, or pass token ids yourself."


@dataclass(frozen=True)
class HashTokenizer:
    """Maps words and punctuation marks to ids by a stable hash, for models without a tokenizer.

    ``prefix`` and ``suffix`` start and end each sequence, and ``special`` ids do not represent text.

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
    """A transformers tokenizer with the attributes of :class:`HashTokenizer`."""

    tokenizer: Any
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    special: frozenset[int]
    unknown: int | None

    def encode(self, text: str) -> list[int]:
        """The ids of ``text`` by the tokenizer, without special tokens."""
        with refusing(InputError, "The model's tokenizer fails on this text", _OWN_IDS):
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


TextEncoder = HashTokenizer | PretrainedTokens


def text_encoder(config: Any, tokenizer: Any | None) -> TextEncoder:
    """The encoder for a model: its tokenizer if it has one, else hashed words over its vocabulary."""
    return hash_tokenizer(config) if tokenizer is None else _wrapped(tokenizer)


def hash_tokenizer(config: Any) -> HashTokenizer:
    """Hashed words over the vocabulary of ``config``, with the start and end tokens that it names.

    [CLS] or else BOS comes first; [SEP], or EOS in an encoder-decoder, comes last. Ids outside the vocabulary are
    omitted.
    """
    named = special_ids(config)
    special = frozenset(id_ for ids in named.values() for id_ in ids)
    first = named.get("cls") or named.get("bos") or ()
    last = named.get("sep") or (named.get("eos", ()) if config.is_encoder_decoder else ())
    return HashTokenizer(ordinary_ids(config, special), first[:1], last[:1], special)


def special_ids(config: Any) -> dict[str, tuple[int, ...]]:
    """The special ids of a configuration that are inside the vocabulary, if it names one, by role."""
    text = config.get_text_config()
    described = {**config.to_dict(), **text.to_dict()}
    size = described.get("vocab_size") or float("inf")
    by_name: dict[str, tuple[int, ...]] = {}
    for role in _NAMED:
        value = described.get(f"{role}_token_id")
        ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        kept = tuple(id_ for id_ in ids if isinstance(id_, int) and 0 <= id_ < size)
        if kept:
            by_name[role] = kept
    return by_name


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
    """Prefix and suffix, found by encoding a word: the ids around its own ids."""
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


# The next cycle through a short text starts this many tokens later, so that no two sequences are the same.
_CYCLE_SHIFT = 37
LARGEST_TEXT = 2**28


@dataclass(frozen=True)
class TokenRows:
    """Token ids, padded on the right: ``ids`` and ``content`` (True where not padding), both (sequences, tokens)."""

    ids: torch.Tensor
    content: torch.Tensor


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        InputError: it is missing, unreadable, larger than 256 MiB, not UTF-8 (with the byte position), or empty.
    """
    try:
        with open_regular(path.expanduser()) as stream:
            raw = stream.read(LARGEST_TEXT + 1)
    except OSError as error:
        raise InputError(f"The text file {str(path)!r} could not be read: {error.strerror}.") from error
    if len(raw) > LARGEST_TEXT:
        raise InputError(
            f"The text file {str(path)!r} has more than {LARGEST_TEXT:,} bytes, and few sequences are read of it. Cut "
            "it first, for example with head -c 10000000."
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"The text file {str(path)!r} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}. "
            "Convert it first, for example with iconv."
        ) from error
    if not text.strip():
        raise InputError(f"The text file {str(path)!r} is empty.")
    return text


def rows_from_texts(texts: Sequence[str], encoder: TextEncoder, tokens: int, pad: int) -> tuple[TokenRows, int]:
    """One row per text, truncated at ``tokens``, and how many texts were longer."""
    room = _room(encoder, tokens)
    encoded, longer = [], 0
    for index, text in enumerate(texts):
        whole = encoder.encode(text)
        ids, longer = whole[:room], longer + (len(whole) > room)
        if not ids:
            raise InputError(f"Text {index} has no tokens: {text[:40]!r}. Leave empty texts out.")
        encoded.append([*encoder.prefix, *ids, *encoder.suffix])
    return padded(encoded, pad), longer


def rows_from_stream(text: str, encoder: TextEncoder, sequences: int, tokens: int, pad: int) -> tuple[TokenRows, int]:
    """Consecutive windows of one long text, as many as it fills, at most ``sequences``; and how many tokens it has."""
    room = _room(encoder, tokens)
    ids = encoder.encode(text)
    _refuse_nothing(ids)
    windows = [ids[start : start + room] for start in range(0, len(ids), room)][:sequences]
    if len(windows) > 1 and len(windows[-1]) < 2:
        windows.pop()
    return padded([[*encoder.prefix, *window, *encoder.suffix] for window in windows], pad), len(ids)


def rows_from_cycle(text: str, encoder: TextEncoder, sequences: int, tokens: int, pad: int) -> tuple[TokenRows, bool]:
    """Exactly ``sequences`` full windows; a text that is too short is repeated from a shifted start.

    Returns:
        The rows, and whether the text had to be used more than once.
    """
    room = _room(encoder, tokens)
    ids = encoder.encode(text)
    _refuse_nothing(ids)
    rows = []
    for index in range(sequences):
        cycle, start = divmod(index * room, len(ids))
        start += cycle * _CYCLE_SHIFT
        rows.append([*encoder.prefix, *(ids[(start + i) % len(ids)] for i in range(room)), *encoder.suffix])
    return padded(rows, pad), sequences * room > len(ids)


def random_rows(ordinary: Sequence[int], sequences: int, tokens: int, seed: int) -> TokenRows:
    """Ids drawn uniformly from ``ordinary``, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(ordinary), (sequences, tokens), generator=generator)
    ids = torch.as_tensor(ordinary)[drawn]
    return TokenRows(ids, torch.ones_like(ids, dtype=torch.bool))


def padded(rows: Sequence[Sequence[int]], pad: int) -> TokenRows:
    """Rows padded to one length; padding is not content."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad, dtype=torch.long)
    content = torch.zeros((len(rows), longest), dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row, dtype=torch.long)
        content[index, : len(row)] = True
    return TokenRows(ids, content)


def kept_tokens(rows: TokenRows, policy: TokensPolicy, special: frozenset[int] | None) -> torch.Tensor:
    """Which tokens count under ``policy``, (sequences, tokens).

    Raises:
        InputError: the policy needs special ids that are unknown, or leaves a sequence empty.
    """
    keep = rows.content.clone()
    if policy == "no-first":
        keep[torch.arange(keep.shape[0]), rows.content.int().argmax(dim=1)] = False
    elif policy == "no-special":
        if special is None:
            raise InputError(
                "tokens_policy 'no-special' needs a tokenizer or a configuration that names special tokens."
            )
        keep &= ~torch.isin(rows.ids, torch.tensor(sorted(special), dtype=rows.ids.dtype, device=rows.ids.device))
    empty = (~keep.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise InputError(f"tokens_policy {policy!r} leaves no token in sequence {empty[0]}; use longer sequences.")
    return keep


def all_or_some(keep: torch.Tensor) -> torch.Tensor | None:
    """None if every token counts, so that no selection is made unnecessarily."""
    return None if bool(keep.all()) else keep


def _refuse_nothing(ids: Sequence[int]) -> None:
    if not ids:
        raise InputError("The model's tokenizer makes no tokens of the text. Pass another text, or token ids yourself.")


def _room(encoder: TextEncoder, tokens: int) -> int:
    room = tokens - len(encoder.prefix) - len(encoder.suffix)
    if room < 1:
        raise InputError(
            f"tokens={tokens} leaves no room for text: {tokens - room} are special tokens. Pass a larger number."
        )
    return room
