"""From texts to rows of token ids of equal length, with the tokens that count marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rankscope._errors import InputError
from rankscope.models.inputs.hashed_words import TextEncoder
from rankscope.models.inputs.record import TokensPolicy

# The next cycle through a short text starts this many tokens later, so that no two sequences are the same.
_CYCLE_SHIFT = 37
LARGEST_TEXT = 2**28


@dataclass(frozen=True)
class Rows:
    """Token ids, padded on the right: ``ids`` and ``content`` (True where not padding), both (sequences, tokens)."""

    ids: torch.Tensor
    content: torch.Tensor


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        InputError: it is missing, unreadable, larger than 256 MiB, not UTF-8 (with the byte position), or empty.
    """
    try:
        with path.expanduser().open("rb") as stream:
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


def rows_from_texts(texts: Sequence[str], encoder: TextEncoder, tokens: int, pad: int) -> tuple[Rows, int]:
    """One row per text, cut at ``tokens``, and how many texts were longer."""
    room = _room(encoder, tokens)
    encoded, longer = [], 0
    for index, text in enumerate(texts):
        whole = encoder.encode(text)
        ids, longer = whole[:room], longer + (len(whole) > room)
        if not ids:
            raise InputError(f"Text {index} has no tokens: {text[:40]!r}. Leave empty texts out.")
        encoded.append([*encoder.prefix, *ids, *encoder.suffix])
    return padded(encoded, pad), longer


def rows_from_stream(text: str, encoder: TextEncoder, sequences: int, tokens: int, pad: int) -> tuple[Rows, int]:
    """Consecutive windows of one long text, as many as it fills, at most ``sequences``; and how many tokens it has."""
    room = _room(encoder, tokens)
    ids = encoder.encode(text)
    _refuse_nothing(ids)
    windows = [ids[start : start + room] for start in range(0, len(ids), room)][:sequences]
    if len(windows) > 1 and len(windows[-1]) < 2:
        windows.pop()
    return padded([[*encoder.prefix, *window, *encoder.suffix] for window in windows], pad), len(ids)


def rows_from_cycle(text: str, encoder: TextEncoder, sequences: int, tokens: int, pad: int) -> tuple[Rows, bool]:
    """Exactly ``sequences`` full windows; a text that is too short is gone through again from a shifted start.

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


def random_rows(ordinary: Sequence[int], sequences: int, tokens: int, seed: int) -> Rows:
    """Ids drawn uniformly from ``ordinary``, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(ordinary), (sequences, tokens), generator=generator)
    ids = torch.as_tensor(ordinary)[drawn]
    return Rows(ids, torch.ones_like(ids, dtype=torch.bool))


def padded(rows: Sequence[Sequence[int]], pad: int) -> Rows:
    """Rows of one length; what was added is not content."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad, dtype=torch.long)
    content = torch.zeros((len(rows), longest), dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row, dtype=torch.long)
        content[index, : len(row)] = True
    return Rows(ids, content)


def kept_tokens(rows: Rows, policy: TokensPolicy, special: frozenset[int] | None) -> torch.Tensor:
    """Which tokens count under ``policy``, (sequences, tokens).

    Raises:
        InputError: the policy needs special ids nobody knows, or leaves a sequence empty.
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
    """None when every token counts, so that nothing is selected where nothing has to be."""
    return None if bool(keep.all()) else keep


def _refuse_nothing(ids: Sequence[int]) -> None:
    if not ids:
        raise InputError("The model's tokenizer makes no tokens of the text. Pass another text, or token ids yourself.")


def _room(encoder: TextEncoder, tokens: int) -> int:
    room = tokens - len(encoder.prefix) - len(encoder.suffix)
    if room < 1:
        raise InputError(f"tokens={tokens} leaves no room beside {tokens - room} special tokens; ask for more.")
    return room
