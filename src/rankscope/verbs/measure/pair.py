"""The shortest length at which two prompts become the same float vector.

Both prompts are followed by the same n tokens. If the last token attends to more and more shared tokens, its
representation depends less and less on what came before; in a float format of few digits the two become equal bit by
bit, and the model cannot answer the prompts differently. With ``pair=("", "1")`` and a text of ones as input, the two
sequences are n and n + 1 times the same token, the case of Barbero et al. (2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import InputError
from rankscope.models.inputs import Batch
from rankscope.models.inputs.given import completed, on_device
from rankscope.models.inputs.rows import read_text, text_encoder
from rankscope.models.inputs.text import sample_text
from rankscope.models.loading import LoadedModel
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.view import ModelView
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import undisturbed

SITE = "block.out"
Vectors = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class PairedPrompts:
    """Token ids of two prompts, and of the text that follows both.

    Attributes:
        first: ids of the first prompt.
        second: ids of the second.
        shared: ids of the text, at least as many as are asked for.
        opening: special ids before each.
        closing: special ids after each.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    shared: tuple[int, ...]
    opening: tuple[int, ...]
    closing: tuple[int, ...]

    @classmethod
    def of(cls, loaded: LoadedModel, pair: Sequence[str], given: Any, tokenizer: Any, most: int) -> PairedPrompts:
        """Encode two prompts, and the text that follows them, repeated as often as needed.

        Raises:
            InputError: not two different prompts, no text, or a model that does not read text.
        """
        if isinstance(pair, str) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise InputError(f"pair={pair!r}: expected two texts.")
        if loaded.config is None or loaded.input_kind != "text":
            raise InputError("pair compares the last token of two texts, and this model does not read text.")
        encoder = text_encoder(loaded.config, loaded.tokenizer if tokenizer is None else tokenizer)
        first, second = (tuple(encoder.encode(text)) if text else () for text in pair)
        if first == second:
            raise InputError(f"pair={tuple(pair)!r}: both prompts are the same tokens.")
        text = tuple(encoder.encode(_text(given)))
        room = most - max(len(first), len(second)) - len(encoder.prefix) - len(encoder.suffix)
        if not text or room < 1:
            raise InputError(
                f"pair leaves no room for shared tokens within {most} tokens. Pass longer lengths or a text."
            )
        return cls(first, second, (text * (room // len(text) + 1))[:room], encoder.prefix, encoder.suffix)

    def ids(self, which: int, shared: int) -> Tensor:
        """One of the two sequences with this many shared tokens."""
        own = (self.first, self.second)[which]
        return torch.tensor([[*self.opening, *own, *self.shared[:shared], *self.closing]])


def _text(given: Any) -> str:
    if given is None:
        return sample_text()
    if isinstance(given, Path):
        return read_text(given)
    if isinstance(given, str):
        return given
    if isinstance(given, (list, tuple)) and given and isinstance(given[0], str):
        return given[0]
    raise InputError("pair needs a text that follows both prompts: pass texts, a text file, or nothing.")


def last_tokens(loaded: LoadedModel, view: ModelView, prompts: PairedPrompts, shared: int) -> Vectors:
    """The last token of both sequences after the last block; each is run alone."""
    found: list[Tensor] = []
    last: dict[str, Tensor] = {}

    def observe(ref: SiteRef, seen: Any) -> None:
        last["vector"] = seen[0, -1].detach().cpu().clone()

    selection = SiteSelection({SITE: frozenset({view.depth - 1})})
    with undisturbed(view.model), quiet_transformers(), trace(view, selection, observe):
        for which in (0, 1):
            part = Batch(completed(loaded, {"input_ids": prompts.ids(which, shared)}), None, 0, 1)
            on_device([part], view.model)[0].run(view.model)
            found.append(last.pop("vector"))
    return found[0], found[1]


def is_same(vectors: Vectors) -> bool:
    """Whether two vectors are equal bit by bit."""
    one, other = (vector.contiguous().view(torch.uint8) for vector in vectors)
    return torch.equal(one, other)


def distance(vectors: Vectors) -> float:
    """Distance relative to the length of the first."""
    one, other = (vector.double() for vector in vectors)
    return float((one - other).norm() / one.norm())


def shortest_same(vectors_at: Callable[[int], Vectors], most: int) -> tuple[int | None, dict[int, float]]:
    """The smallest tried n at which the vectors are the same, and the distances at every tried n.

    Doubles n until they are the same, then bisects. They are the same at the n returned and differ at n - 1, both
    checked bit by bit; lengths in between that were not tried may break the pattern.

    Args:
        vectors_at: the two vectors with n shared tokens.
        most: largest n.

    Example:
        >>> same = lambda n: (torch.ones(1), torch.ones(1) + (n < 11))
        >>> shortest_same(same, 100)[0]
        11
    """
    tried: dict[int, float] = {}

    def same(n: int) -> bool:
        vectors = vectors_at(n)
        tried[n] = distance(vectors)
        return is_same(vectors)

    low, high = 0, 1
    while not same(high):
        if high == most:
            return None, tried
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if same(middle) else (middle, high)
    return high, tried


def paired(loaded: LoadedModel, view: ModelView, prompts: PairedPrompts, pair: Sequence[str]) -> dict[str, Any]:
    """The entry of a run: from how many shared tokens on the prompts are the same vector, with a sentence."""
    most = len(prompts.shared)
    found, tried = shortest_same(lambda n: last_tokens(loaded, view, prompts, n), most)
    names = " and ".join(repr(text[:40]) for text in pair)
    if found is None:
        sentence = f"The prompts {names} stay apart up to {most} shared tokens (relative distance {tried[most]:.2g})."
    else:
        before = f"; after {found - 1} they differ by {tried[found - 1]:.2g}" if found > 1 else ""
        what = f"the same {loaded.dtype} vector at the last token"
        sentence = f"The prompts {names} become {what} after {found} shared tokens{before}."
    return {"prompts": list(pair), "site": SITE, "layer": view.depth - 1, "equal_from": found, "most": most,
            "distances": {str(n): tried[n] for n in sorted(tried)}, "sentence": sentence}  # fmt: skip
