"""Follows the states of a residual stream between its blocks, to find sums that bring an earlier one back.

A block's own skip carries the stream around a branch of that block, and :class:`~rankscope.stream.frames.StreamFrame`
finds it. A long skip carries a state around whole blocks: the output of block 2 is added to that of block 9, or the
embedding to the input of every block. It is written in the model's own loop as often as in a block, so states are
followed through the whole pass, by tensor identity.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rankscope.pass_graph.identity import ByTensor
from rankscope.stream.frames import StreamFrame, summands_of, tensors_in
from rankscope.stream.operators import JOINS, SUMS


@dataclass(frozen=True)
class LongSum:
    """A sum of two states of one stream.

    Attributes:
        carried: the tensor that is the earlier state, with any gain that the model has put on it.
        first: the first block that it goes around.
        last: the last one.
    """

    carried: Tensor
    first: int
    last: int


class States(StreamFrame):
    """The states of one stream in one pass: its value before the first block, and after each block.

    A state has a number: how many blocks had run when it came to be. Sums inside a block belong to the state that
    entered it, so that a block's own skips are not mistaken for long ones.

    Args:
        entry: what the first block takes.
        before: what was computed before the first block. A tensor of the same shape among it is the first state too:
            the embedding that is added again in every round may never enter a block by itself.
    """

    def __init__(self, entry: Tensor, before: Iterable[weakref.ref[Tensor]] = ()) -> None:
        self._number = self._joined_number = 0
        self._numbers = ByTensor[int]()
        super().__init__(entry, "joined")
        for reference in before:
            if (tensor := reference()) is not None and tensor.shape == entry.shape:
                self.follow(tensor)

    def reach(self, tensor: Tensor, blocks_run: int) -> None:
        """This tensor is the stream now, and so many blocks have run."""
        self._number = blocks_run
        self.follow(tensor)

    def follow(self, tensor: Tensor) -> None:
        """From now on this object is (also) the state that is being followed."""
        super().follow(tensor)
        self._numbers[tensor] = self._number

    def follow_normed(self, tensor: Tensor) -> None:
        """This object is a norm of the state that is being followed."""
        super().follow_normed(tensor)
        self._numbers[tensor] = self._number

    def number_of(self, candidate: object) -> int | None:
        """The number of the state that this exact object is; None if it is none."""
        return self._numbers.get(candidate)

    def long_sum(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> LongSum | None:
        """The sum, if this call adds a state to a later one, or puts the two side by side."""
        if func not in SUMS and func not in JOINS:
            return None
        given = tensors_in((args, kwargs), depth=3)
        if len({number for value in given if (number := self.number_of(value)) is not None}) != 2:
            return None
        terms = summands_of(func, args, kwargs)
        summands = [
            [factor for factor in term.factors if isinstance(factor, Tensor) and self.number_of(factor) is not None]
            for term in terms or ()
            if not term.is_product
        ]
        # Each summand holds one state, and what is scaled appears once, so that scaling it scales its summand.
        if [len(states) for states in summands] != [1, 1]:
            return None
        (earlier, first), (_, later) = sorted(
            ((states[0], self.number_of(states[0]) or 0) for states in summands), key=lambda pair: pair[1]
        )
        if sum(value is earlier for value in given) != 1:
            return None
        return LongSum(earlier, first, later - 1)

    def see(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        found: LongSum | None,
    ) -> bool:
        """Follow the states through a call that has run; ``found`` is the long sum that it was.

        Returns:
            Whether ``out`` is the sum of two states, which counts as the later one.
        """
        if found is not None and func in JOINS:
            self._joined_number = found.last + 1
            self.follow_joined(func, args, kwargs, out)
            return False
        if found is not None:
            self._joined_number = found.last + 1
            self.supersede(out)
            return True
        made = self.makes_one_stream(func, args, kwargs, out)
        if not made:
            numbers = {number for value in tensors_in(args) if (number := self.number_of(value)) is not None}
            if len(numbers) == 1:
                self._number = numbers.pop()
                self.pass_on(func, args, out)
        return made

    def supersede(self, tensor: Tensor) -> None:
        """From now on this object alone is the later of the two states; earlier ones stay known.

        A model that goes on with the state from before the sum has used the sum for something else, as a gate does.
        """
        self._numbers.drop_where(lambda number: number == self._joined_number)
        self.reach(tensor, self._joined_number)
