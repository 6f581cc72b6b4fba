"""Which axis of an array is which, and at which site of which block each layer was taken.

An order of axes is never guessed from sizes that allow two: sequences and tokens, or layers and tokens, would be
exchanged without a trace.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from rankscope.errors import InputError
from rankscope.stream.sites import SITES, SiteRef

AXES = ("batch", "layers", "tokens", "dim")
DEFAULT_SITE = "block.out"
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_SITE_NAME = re.compile(r"([a-z_]+\.?[a-z_]*)@(\d{1,6})")
_NUMBER = re.compile(r"\d{1,6}")
STACKED = "One array with all layers needs its axes declared"


@dataclass(frozen=True)
class Axes:
    """The order of the axes of an array.

    Example:
        >>> Axes.parse("tokens layers dim").words
        ('tokens', 'layers', 'dim')
    """

    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Axes:
        """Read words such as ``"tokens layers dim"``."""
        words = tuple(text.split())
        is_known = set(words) <= set(AXES) and len(set(words)) == len(words)
        if not is_known or "dim" not in words or not {"tokens", "batch"} & set(words):
            raise InputError(
                f"layout={text!r}: expected dim and tokens, or batch for inputs of one vector each, or both, and "
                "optionally layers, each once, in the order of the array's axes, e.g. 'tokens layers dim'."
            )
        return cls(words)

    @property
    def is_stacked(self) -> bool:
        """Whether one array holds all layers."""
        return "layers" in self.words

    def size(self, word: str, shape: Sequence[int]) -> int:
        """Size of an axis; 1 if the array does not have it."""
        return int(shape[self.words.index(word)]) if word in self.words else 1

    def check(self, shape: Sequence[int], name: str) -> None:
        """Refuse an array with another number of axes, or an empty one."""
        if len(shape) != len(self.words):
            raise InputError(
                f"{name} has shape {tuple(shape)}, which is not '{' '.join(self.words)}'. Pass layout= with one word "
                f"per axis out of {', '.join(AXES)}."
            )
        if 0 in shape:
            raise InputError(f"{name} has shape {tuple(shape)}: it is empty.")


def axes_of_layer(shape: Sequence[int], name: str, *, is_sequence: bool) -> Axes:
    """The axes of an array that holds one layer: ``tokens dim`` or ``batch tokens dim``.

    Args:
        shape: its shape.
        name: its name, for errors.
        is_sequence: whether something says that a matrix holds the tokens of one sequence: their ids, a mask, or that
            there is a file or dictionary for each sequence.

    Raises:
        InputError: nothing says it, and its rows may be inputs of one vector each.
    """
    if len(shape) == 2 and not is_sequence:
        raise InputError(rows_unknown(shape, name))
    axes = Axes(("tokens", "dim") if len(shape) == 2 else ("batch", "tokens", "dim"))
    axes.check(shape, name)
    return axes


def rows_unknown(shape: Sequence[int], name: str) -> str:
    """The question what the rows of a matrix are."""
    return (
        f"{name} has shape {tuple(shape)}, and its rows may be the {shape[0]} tokens of one sequence, which are "
        f"compared with each other, or {shape[0]} inputs of one vector each, such as embeddings of sentences. "
        "Pass layout='tokens dim' or layout='batch dim' (--layout on the command line)."
    )


def axes_of_stack(shape: Sequence[int], ids: tuple[int, ...] | None, name: str) -> Axes:
    """The axes of an array that holds all layers, if the shape of the token ids leaves only one reading.

    ``dim`` is the last axis. Files of vLLM are ``tokens layers dim`` with the ids of the tokens beside them.
    """
    say = "layout='tokens layers dim' (as vLLM writes it) or 'layers tokens dim' (--layout on the command line)"
    if len(shape) == 2:
        raise InputError(rows_unknown(shape, name))
    if ids is None or len(ids) != len(shape) - 2:
        raise InputError(f"{STACKED}: {name} has shape {tuple(shape)}, and no token_ids say which axis is the tokens. "
                         f"Pass {say}.")  # fmt: skip
    leading = ("batch", "tokens", "layers") if len(shape) == 4 else ("tokens", "layers")
    sizes = dict(zip(("batch", "tokens") if len(ids) == 2 else ("tokens",), ids, strict=True))
    fits = [
        order
        for order in permutations(leading)
        if all(sizes.get(word, size) == size for word, size in zip(order, shape, strict=False))
    ]
    if len(fits) != 1:
        why = "fit no axis" if not fits else "fit more than one order of the axes"
        raise InputError(f"{STACKED}: {name} has shape {tuple(shape)}, and token_ids of shape {ids} {why}. Pass {say}.")
    return Axes((*fits[0], "dim"))


def parse_sites(words: Sequence[str] | str) -> tuple[SiteRef, ...]:
    """Sites in order, e.g. ``["block.in@0", "block.out@0-2"]``.

    Example:
        >>> [str(ref) for ref in parse_sites("block.in@0 block.out@0-1")]
        ['block 0 block.in', 'block 0 block.out', 'block 1 block.out']
    """
    refs: list[SiteRef] = []
    for word in words.split() if isinstance(words, str) else words:
        site, at, numbers = word.partition("@")
        if site not in SITES or site.endswith((".probs", ".mixed")) or not at:
            raise InputError(
                f"at: {word!r} is not a stream site with block numbers, as in 'block.out@0-11' or 'final@11'."
            )
        for piece in numbers.split(","):
            match = _RANGE.fullmatch(piece)
            if match is None:
                raise InputError(
                    f"at: {word!r}: after '@' come block numbers, as in 'block.out@0-11' or 'block.out@1,15'."
                )
            first, last = int(match[1]), int(match[2] or match[1])
            refs.extend(SiteRef(None, layer, site) for layer in range(first, last + 1))
    if len(set(refs)) < len(refs):
        raise InputError("at: a site is named twice.")
    return tuple(refs)


def sites_of_names(names: Sequence[str], where: str) -> dict[str, SiteRef]:
    """The site of each array of one layer, from its name.

    ``block.in@0`` says it all. Otherwise the names must be equal up to one number, as in ``layers.0``, ``layers.1``:
    the number is that of the block, and the site is ``block.out``.
    """
    named = {name: match for name in names if (match := _SITE_NAME.fullmatch(name))}
    if named:
        if odd := [name for name in names if name not in named or named[name][1] not in SITES]:
            raise InputError(f"{where}: {odd[0]!r:.80} is not a site such as 'block.out@3', while other names are.")
        refs = parse_sites(names)
        return dict(zip(names, refs, strict=True))
    stems = {name: _NUMBER.split(name) for name in names}
    first = names[0]
    if odd := [name for name in names if stems[name] != stems[first] or len(stems[name]) == 1]:
        raise InputError(
            f"{where}: {odd[0]!r:.80} is not the name of a layer{_beside(first, odd[0])}. Name the arrays after their "
            "sites ('block.in@0', 'block.out@0', ...) or number them ('layers.0', 'layers.1', ...); token_ids and "
            "attention_mask may be beside them."
        )
    numbers = {name: [int(number) for number in _NUMBER.findall(name)] for name in names}
    varying = [place for place in range(len(stems[first]) - 1) if len({numbers[name][place] for name in names}) > 1]
    if len(varying) > 1 or (not varying and len(stems[first]) > 2):
        raise InputError(f"{where}: the names, such as {first!r:.80}, hold several numbers; one must be the block's.")
    place = varying[0] if varying else 0
    sites = {name: SiteRef(None, numbers[name][place], DEFAULT_SITE) for name in names}
    if len(set(sites.values())) < len(sites):
        raise InputError(f"{where}: two names, such as {first!r:.80}, stand for the same block.")
    return dict(sorted(sites.items(), key=lambda entry: entry[1].layer))


def _beside(first: str, odd: str) -> str:
    return "" if odd == first else f" like {first!r:.80}"


def relabelled(found: Mapping[str, SiteRef], at: tuple[SiteRef, ...], where: str) -> dict[str, SiteRef]:
    """The layers in order, with the declared sites.

    Raises:
        InputError: not one site per layer.
    """
    if len(at) != len(found):
        raise InputError(f"{where} holds {len(found)} layers, and at= names {len(at)} sites. Name one per layer.")
    return dict(zip(found, at, strict=True))
