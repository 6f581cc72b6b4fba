"""Replaces some tokens of the residual stream, and sees whether others change.

Each pass of the experiment replaces one set of tokens in every sequence. Two passes on two sequences test four sets,
and each token is in two of the four. There are six such choices, and of two tokens with different ones each is in a set
without the other. The first and the last token have a choice of their own, and the others one of the remaining four at
random, never that of their neighbour. So each pair that includes the first or last token, each pair of neighbours and
three quarters of all other pairs are tested in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.errors import SiteError
from rankscope.linalg.rounding import differs
from rankscope.models.stream import Stream
from rankscope.models.view import Response

PASSES = 2
"""Number of sets of tokens that are replaced, one after the other."""
_CHOICES = (0b0101, 0b1010, 0b0110, 0b1001, 0b0011, 0b1100)
"""The sets that a token is in: those of the first sequence in either pass, then those of the second."""
_ROUNDINGS = {torch.float64: 64, torch.float32: 64}
"""Roundings of the largest entry by which sums may differ if formed in another order; 2 for half precision."""


@dataclass(frozen=True)
class Tokens:
    """Where the tokens of one residual stream are.

    Attributes:
        shape: shape of the stream.
        batch: number of sequences.
        stream: how the stream is stored, if declared; otherwise channels are taken to be the last axis.
    """

    shape: torch.Size
    batch: int
    stream: Stream | None = None

    def replaced(self, number: int) -> Tensor | None:
        """Which entries belong to a token that this pass replaces; None if there are fewer than two tokens."""
        if self.stream is not None and self.stream.axes is not None:
            joined = replace(self.stream, streams="join")
            try:
                batch, tokens, dim = joined.sizes(self.shape, self.batch)
            except SiteError:
                return None
            if tokens < 2:
                return None
            chosen = _chosen(batch, tokens, number)[..., None].expand(-1, -1, dim)
            return joined.native(chosen, self.shape, self.batch)
        places = self.shape[:-1]
        count = places.numel()
        rows = self.batch if count % self.batch == 0 else 1
        if count < 2 * rows:
            return None
        chosen = _chosen(rows, count // rows, number)
        if len(places) == 2 and places[0] != self.batch and places[1] == self.batch:
            chosen = chosen.T
        return chosen.reshape(*places, 1).expand(self.shape)

    def with_others(self, content: Tensor, number: int) -> Tensor | None:
        """The stream, or a view of it, with random numbers of its size added to the replaced tokens."""
        replaced = self.replaced(number) if is_plain(content) else None
        if replaced is None or content.numel() != replaced.numel():
            return None
        drawn = np.random.default_rng(number).standard_normal(content.shape, dtype=np.float32)
        finite = content[content.isfinite()].float()
        size = float(finite.square().mean().sqrt()) if finite.any() else 1.0
        moved = content + (torch.from_numpy(drawn) * size).to(content.device, content.dtype)
        chosen = torch.where(replaced.to(content.device).reshape(content.shape), moved, content)
        return content.clone().copy_(chosen)  # in the same order in memory, or it could not be viewed as the stream is

    def fits(self, shape: torch.Size) -> bool:
        """Whether a part of a branch has as many entries as the stream, or as one of its several streams."""
        if shape.numel() == self.shape.numel():
            return True
        if self.stream is None or not self.stream.has_streams or self.stream.axes is None:
            return False
        try:
            words, sizes = self.stream.unfolded(self.shape, self.batch)
        except SiteError:
            return False
        return shape.numel() * sizes[list(words).index("streams")] == self.shape.numel() and len(shape) == 3

    def response(self, before: Tensor, passes: Sequence[Tensor], *, is_part: bool = False) -> Response | None:
        """How a branch responds to replaced tokens: for these ``"alone"``, or it ``"mixes"``; None if it stays.

        Args:
            before: the branch as it is.
            passes: the branch in each pass.
            is_part: whether it is a part of a branch, which may have its axes in the usual order, however the stream is
                stored.
        """
        if any(not is_plain(one) or one.shape != before.shape for one in (before, *passes)):
            return None
        seen = [self._changed(before, after, number, is_part) for number, after in enumerate(passes)]
        if any(change is not None and change[1] for change in seen):
            return "mixes"
        return "alone" if all(change is not None and change[0] for change in seen) else None

    def _changed(self, before: Tensor, after: Tensor, number: int, is_part: bool) -> tuple[bool, bool] | None:
        """Whether replaced tokens changed, and whether others did, in the order of axes in which fewest others did."""
        changed = differs(before, after, _ROUNDINGS.get(before.dtype, 2))
        replaced = self.replaced(number)
        orders = [] if replaced is None or replaced.numel() != before.numel() else [replaced.reshape(before.shape)]
        orders += self._in_usual_order(before, number) if is_part else []
        changes = []
        for order in orders:
            here = order.to(before.device)
            changes.append((bool((changed & here).any()), bool((changed & ~here).any())))
        return min(changes, key=lambda change: change[1], default=None)

    def _in_usual_order(self, value: Tensor, number: int) -> Iterator[Tensor]:
        """Which entries belong to a replaced token if the axes are ``batch tokens dim`` or ``tokens batch dim``."""
        if value.dim() != 3:
            return
        if value.shape[0] == self.batch and value.shape[1] > 1:
            yield _chosen(self.batch, value.shape[1], number)[..., None].expand(value.shape)
        if value.shape[1] == self.batch and value.shape[0] > 1:
            yield _chosen(self.batch, value.shape[0], number).T[..., None].expand(value.shape)


def is_plain(value: Tensor) -> bool:
    """Whether a tensor has memory of its own that can be compared."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(value)
    return type(value) in (Tensor, nn.Parameter) and not is_wrapped and not value.is_meta and value.is_floating_point()


@lru_cache(maxsize=64)
def _chosen(rows: int, tokens: int, number: int) -> Tensor:
    """The replaced tokens of each sequence in the pass of this number."""
    draw = np.random.default_rng(tokens)
    choices = [0]
    for _ in range(tokens - 2):
        choices.append(int(draw.choice([one for one in range(2, 6) if one != choices[-1]])))
    sets = torch.tensor([_CHOICES[one] for one in (*choices, 1)])
    # A single sequence is tested in one direction only, but for its two ends.
    return torch.stack([(sets >> (row % 2 * PASSES + number)) & 1 == 1 for row in range(rows)])
