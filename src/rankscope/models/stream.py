"""The layout of a residual stream in the tensors that blocks pass to each other. Pure data and reshaping."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from rankscope.errors import InputError, SiteError

_WORDS = ("batch", "tokens", "dim", "streams")
_ENTRY = re.compile(r"\(\s*(\w+)\s+(\w+)\s*\)|(\w+)")


@dataclass(frozen=True)
class Stream:
    """The layout of the residual stream in the inputs and outputs of a block.

    Declare it (``measure(Model(module, stream=Stream("batch dim tokens")), x)``) if a model does not hold its stream as
    ``batch tokens dim`` or ``tokens batch dim``, which are distinguished automatically.

    Args:
        axes: one word per axis: ``batch``, ``tokens``, ``dim`` or ``streams``. ``tokens`` stands for as many
            axes as are left (height and width of an image). Two words in parentheses share an axis, the first changing
            slowest: ``"(batch tokens) dim"``. None for the two orders that need no declaration.
        slot: which of the tensors that a block returns is the stream: a number, the name of an entry or field, or
            ``"sum"`` for the sum of the first two, as in blocks that pass on ``(hidden, residual)``.
        streams: how several streams per token are read: ``"join"`` concatenates their channels, ``"sum"`` and
            ``"mean"`` combine them, a number picks one.
        skips: ``"inside"`` the blocks, or ``"around"`` them: the model's own loop adds the output of a block to
            its input, so the stream after a block is their sum.
        takes: what the modules take: the ``"stream"``, or a ``"branch"`` that they write into streams mixed elsewhere,
            so that only what they return is the stream.
        argument: which argument of a block is the stream, by position or by name. None to find it: the first tensor, or
            the one in which a block gets what the block before it returned in ``slot``.

    Example:
        >>> Stream("batch dim tokens").canonical(torch.zeros(2, 64, 7, 7)).shape
        torch.Size([2, 49, 64])
        >>> str(Stream("batch dim tokens", slot=1))
        'batch dim tokens slot=1'
        >>> Stream.parse("slot=sum") == Stream(slot="sum")
        True
    """

    axes: str | None = None
    slot: int | str = 0
    streams: Literal["join", "sum", "mean"] | int = "join"
    skips: Literal["inside", "around"] = "inside"
    takes: Literal["stream", "branch"] = "stream"
    argument: int | str | None = None

    def __post_init__(self) -> None:
        if self.axes is not None:
            object.__setattr__(self, "axes", " ".join(_spelled(entry) for entry in _entries(self.axes)))
            _check(self.axes)
        if isinstance(self.streams, str) and self.streams not in ("join", "sum", "mean"):
            raise InputError(f"streams={self.streams!r}: expected 'join', 'sum', 'mean' or the number of a stream.")
        if isinstance(self.slot, int) and self.slot < 0:
            raise InputError(f"slot={self.slot}: expected the number of a tensor, from 0, its name, or 'sum'.")
        if self.skips not in ("inside", "around"):
            raise InputError(f"skips={self.skips!r}: expected 'inside' or 'around'.")
        if self.takes not in ("stream", "branch"):
            raise InputError(f"takes={self.takes!r}: expected 'stream' or 'branch'.")
        if self.streams != "join" and not self.has_streams:
            raise InputError(f"streams={self.streams!r} needs an axis of that name, as in 'batch tokens streams dim'.")

    @classmethod
    def parse(cls, text: str) -> Stream:
        """Parse what ``str`` writes: words for axes, then options such as ``slot=`` and ``skips=``."""
        named = {field.name for field in fields(cls)} - {"axes"}
        axes, options = [], {}
        for word in re.findall(r"\([^)]*\)|\S+", text):
            name, equals, value = word.partition("=")
            if not equals:
                axes.append(word)
            elif name in named:
                options[name] = int(value) if re.fullmatch(r"-?\d+", value) else value
            else:
                raise InputError(f"{word!r} in {text!r} is not part of a stream; expected {', '.join(sorted(named))}=.")
        return cls(" ".join(axes) or None, **options)  # type: ignore[arg-type]

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self._declared().items()]
        return " ".join(([self.axes] if self.axes else []) + options)

    def __repr__(self) -> str:
        options = [f"{name}={value!r}" for name, value in self._declared().items()]
        return f"Stream({', '.join(([repr(self.axes)] if self.axes else []) + options)})"

    def _declared(self) -> dict[str, int | str]:
        """The options that are not at their defaults."""
        return {f.name: value for f in fields(self)[1:] if (value := getattr(self, f.name)) != f.default}

    @property
    def is_plain(self) -> bool:
        """Whether the stream is one tensor in one of the two orders that every verb supports."""
        return self.axes in (None, "batch tokens dim", "tokens batch dim") and self.has_plain_blocks

    @property
    def has_plain_blocks(self) -> bool:
        """Whether a block's first tensor, in and out, is the stream, and skips are inside."""
        return self.slot == 0 and self.skips == "inside" and self.takes == "stream" and self.argument is None

    @property
    def has_streams(self) -> bool:
        """Whether a token has several residual streams."""
        return any("streams" in entry for entry in _entries(self.axes or ""))

    @property
    def folds_batch(self) -> bool:
        """Whether sequences share an axis with something else."""
        return any("batch" in entry and len(entry) > 1 for entry in _entries(self.axes or ""))

    def with_axes(self, axes: str) -> Stream:
        """The same with these axes, if none were declared."""
        return self if self.axes is not None else replace(self, axes=axes)

    def sizes(self, shape: torch.Size, sequences: int | None = None) -> tuple[int, int, int]:
        """Sequences, tokens and channels of a tensor of this shape.

        Raises:
            SiteError: a tensor with other axes.
        """
        words, sizes = self.unfolded(shape, sequences)
        if self.streams != "join":
            words, sizes = _without_streams(words, sizes)
        return _grouped(words, sizes)

    def canonical(self, x: Tensor, sequences: int | None = None) -> Tensor:
        """The tensor as ``batch tokens dim``.

        Args:
            x: the tensor in the block's own layout.
            sequences: number of sequences, needed if ``batch`` shares an axis.

        Raises:
            SiteError: a tensor with other axes.
        """
        if self.axes in (None, "batch tokens dim"):
            return x.flatten(1, -2) if x.dim() > 3 else x
        if self.axes == "tokens batch dim" and x.dim() == 3:
            return x.transpose(0, 1)
        words, sizes = self.unfolded(x.shape, sequences)
        x = x.reshape(sizes)
        if self.streams != "join":
            x = _one_stream(x, words.index("streams"), self.streams)
            words, sizes = _without_streams(words, sizes)
        return x.permute(_order(words)).reshape(_grouped(words, sizes))

    def native(self, x: Tensor, shape: torch.Size, sequences: int | None = None) -> Tensor:
        """A stream ``batch tokens dim`` in the block's own layout; the inverse of :meth:`canonical`."""
        if self.axes in (None, "batch tokens dim"):
            return x.reshape(shape)
        words, sizes = self.unfolded(shape, sequences)
        order = _order(words)
        back = sorted(range(len(order)), key=order.__getitem__)
        return x.reshape([sizes[axis] for axis in order]).permute(back).reshape(shape)

    def apart(self, x: Tensor, sequences: int | None = None) -> Tensor:
        """The streams of each token, as ``batch tokens streams dim``; all of them, whatever ``streams`` says.

        Example:
            >>> Stream("(batch streams) tokens dim").apart(torch.zeros(8, 5, 16), sequences=2).shape
            torch.Size([2, 5, 4, 16])
        """
        words, sizes = self.unfolded(x.shape, sequences)
        batch, tokens, joined = _grouped(words, sizes)
        streams = sizes[words.index("streams")]
        return x.reshape(sizes).permute(_order(words)).reshape(batch, tokens, streams, joined // streams)

    def from_apart(self, x: Tensor, shape: torch.Size, sequences: int | None = None) -> Tensor:
        """Streams ``batch tokens streams dim`` in the block's own layout; the inverse of :meth:`apart`."""
        return self.native(x.flatten(2), shape, sequences)

    def unfolded(self, shape: torch.Size, sequences: int | None) -> tuple[list[str], list[int]]:
        """A word and a size for each axis, after splitting shared ones.

        Raises:
            SiteError: a tensor with other axes.
        """
        words: list[str] = []
        sizes: list[int] = []
        for entry, size in zip(self._by_axis(len(shape)), shape, strict=True):
            words.extend(entry)
            if len(entry) == 1:
                sizes.append(size)
                continue
            if sequences is None or size % sequences:
                raise SiteError(
                    f"An axis of {size} cannot be read as '{_spelled(entry)}' in a pass of "
                    f"{'an unknown number of' if sequences is None else sequences} sequences."
                )
            sizes.extend((sequences, size // sequences) if entry[0] == "batch" else (size // sequences, sequences))
        return words, sizes

    def axis_of(self, word: str, axes: int) -> int:
        """Number of the axis of that name, in a tensor with this many axes."""
        return next(axis for axis, entry in enumerate(self._by_axis(axes)) if word in entry)

    def _by_axis(self, axes: int) -> list[tuple[str, ...]]:
        entries = _entries(self.axes or "batch tokens dim")
        spare = axes - len(entries)
        if spare < 0 or (spare and ("tokens",) not in entries):
            raise SiteError(
                f"a tensor with {axes} axes cannot be read as '{self.axes or 'batch tokens dim'}'. Declare its axes, "
                "e.g. stream=rankscope.Stream('batch dim tokens'), --layout 'batch dim tokens'."
            )
        at = entries.index(("tokens",)) if spare else 0
        return entries[:at] + [("tokens",)] * spare + entries[at:]


def stream_of(stream: Stream | str | None) -> Stream | None:
    """A declaration from user input.

    Raises:
        InputError: something else.
    """
    if stream is None or isinstance(stream, Stream):
        return stream
    if isinstance(stream, str):
        return Stream.parse(stream)
    raise InputError(
        f"stream={stream!r}: expected how the residual stream lies, e.g. rankscope.Stream('batch dim tokens')."
    )


def _order(words: list[str]) -> list[int]:
    """The axes by kind: sequences, tokens, streams, channels."""
    return sorted(range(len(words)), key=lambda axis: ("batch", "tokens", "streams", "dim").index(words[axis]))


def _grouped(words: list[str], sizes: list[int]) -> tuple[int, int, int]:
    sizes_by_word = {"batch": 1, "tokens": 1, "streams": 1, "dim": 1}
    for word, size in zip(words, sizes, strict=True):
        sizes_by_word[word] *= size
    return sizes_by_word["batch"], sizes_by_word["tokens"], sizes_by_word["streams"] * sizes_by_word["dim"]


def _without_streams(words: list[str], sizes: list[int]) -> tuple[list[str], list[int]]:
    axis = words.index("streams")
    return words[:axis] + words[axis + 1 :], sizes[:axis] + sizes[axis + 1 :]


def _one_stream(x: Tensor, axis: int, which: str | int) -> Tensor:
    if isinstance(which, int):
        if not 0 <= which < x.shape[axis]:
            raise SiteError(f"streams={which}: a token has {x.shape[axis]} streams here, numbered from 0.")
        return x.select(axis, which)
    return x.sum(axis) if which == "sum" else x.mean(axis)


def _entries(axes: str) -> list[tuple[str, ...]]:
    if _ENTRY.sub("", axes).strip():
        raise InputError(f"axes={axes!r}: expected words such as 'batch dim tokens', or '(batch tokens) dim'.")
    return [(a, b) if a else (c,) for a, b, c in _ENTRY.findall(axes)]


def _spelled(entry: tuple[str, ...]) -> str:
    return entry[0] if len(entry) == 1 else f"({' '.join(entry)})"


def _check(axes: str) -> None:
    entries = _entries(axes)
    words = [word for entry in entries for word in entry]
    unknown = sorted(set(words) - set(_WORDS))
    if unknown:
        raise InputError(f"axes={axes!r}: {unknown[0]!r} is not one of {', '.join(_WORDS)}.")
    single = {word: words.count(word) for word in ("batch", "dim")}
    if any(count != 1 for count in single.values()) or "tokens" not in words or words.count("streams") > 1:
        raise InputError(f"axes={axes!r}: expected batch and dim once each, tokens, and streams at most once.")
    if any(len(entry) == 2 and "batch" not in entry for entry in entries):
        raise InputError(f"axes={axes!r}: only batch can share an axis, since only the number of sequences is known.")
