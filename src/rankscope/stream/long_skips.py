"""Finds the long skips of a stack while the model runs, once it is known which module calls are its blocks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from rankscope.stream.carries import KnownCall
from rankscope.stream.frames import StreamFrame, tensors_in
from rankscope.stream.states import LongSum, States


class LongSkips:
    """Finds the long skips of one stack while the probe runs, once it is known which module calls are its blocks.

    Attributes:
        found: for each long skip, the first and the last block that it goes around, and the block calls begun.
        is_lost: whether the result of one did not become the stream that the next block takes.
    """

    def __init__(self, calls: Mapping[int, KnownCall]) -> None:
        self.found: list[tuple[int, int, int]] = []
        self.is_lost = False
        self._calls = calls
        self._begun = 0
        self._states: States | None = None
        self._before: list[weakref.ref[Tensor]] = []
        self._frame: StreamFrame | None = None

    def enter(self, number: int, entry: Tensor, frame: StreamFrame) -> None:
        """A module call begins."""
        if number not in self._calls:
            return
        if self._states is None:
            self._states = States(entry, self._before)
        elif self._states.number_of(entry) is None:
            self._check(entry)
            self._states.reach(entry, self._calls[number].first)
        self._begun += 1
        self._frame = frame

    def leave(self, number: int, out: Tensor) -> None:
        """A module call ends."""
        if number in self._calls and self._states is not None:
            self._states.reach(out, self._calls[number].last + 1)
            self._frame = None

    def note_sum(self, number: int, add: int, stream: Tensor, out: Tensor) -> None:
        """A branch was added to the stream in a module call, as its add of that number."""
        if number in self._calls and self._states is not None:
            self._check(stream)
            self._states.reach(out, self._calls[number].adds[add][0])

    def _check(self, stream: Tensor) -> None:
        """Since the last long skip, if one has just been met, what goes on as the stream must be its result."""
        assert self._states is not None
        if self.found and self.found[-1][2] == self._begun and self._states.number_of(stream) is None:
            self.is_lost = True

    def match(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> LongSum | None:
        """The long skip that this call is."""
        found = None if self._states is None else self._states.long_sum(func, args, kwargs)
        if found is not None:
            self.found.append((found.first, found.last, self._begun))
        return found

    def see(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, found: LongSum | None
    ) -> None:
        """A call has run."""
        if self._states is None:
            self._before += map(weakref.ref, tensors_in(out))
            return
        # Inside a block, the result has to be what the block goes on with, and not a gate or a further branch.
        if self._states.see(func, args, kwargs, out, found) and self._frame is not None:
            self.is_lost |= not self._frame.is_stream(out)
