"""Decides by experiment which branches act on each token alone.

A name is not evidence: a module called ``mlp`` may mix tokens, and one called ``token_mixer`` may not. So the model is
run again with some tokens of the stream replaced, and what each branch adds is compared with the pass before:

- The set of replaced tokens is the same wherever the stream begins: at the input of a module call, and after every sum.
  There the values of the reference pass are restored, with the replaced tokens, so that each branch is tested alone and
  one pass tests all of them.
- A branch *mixes* if what it adds to any other token changes, and acts on tokens *alone* if it changes for replaced
  tokens only. One that does not change at all, as with weights that are zero, is left undecided.

Two passes on two sequences test four sets of tokens. Each token is in two of the four. There are six such choices, and
of two tokens with different ones each is in a set without the other. The first and the last token have a choice of
their own, and the others one of the remaining four at random, never that of their neighbour. So each pair that includes
the first or last token, each pair of neighbours and three quarters of all other pairs are tested in both directions.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.errors import SiteError
from rankscope.linalg.rounding import differs
from rankscope.models.stream import Stream
from rankscope.models.view import Response
from rankscope.models.wrapping import hidden

PASSES = 2
"""Number of passes with replaced tokens."""
_CHOICES = (0b0101, 0b1010, 0b0110, 0b1001, 0b0011, 0b1100)
"""The sets that a token is in: those of the first sequence in either pass, then those of the second."""
_LARGEST = 1 << 26
"""Larger parameters that are zero stay zero: weights that are read later, block by block, take no memory yet."""
_ROUNDINGS = {torch.float64: 64, torch.float32: 64}
"""Roundings of the largest entry by which sums may differ if formed in another order; 2 for half precision."""


@dataclass
class TokenTrial:
    """What one pass of the probe keeps of the stream and its branches, or compares with what another one kept.

    Attributes:
        batch: number of sequences.
        stream: how the stream is stored, if declared; otherwise channels are taken to be the last axis.
        number: which set of tokens is replaced; None for the reference pass.
        kept: the values of the reference pass, by place.
        changed: for each place, whether replaced tokens changed, and whether others did.
    """

    batch: int
    stream: Stream | None = None
    number: int | None = None
    kept: dict[Hashable, Tensor] = field(default_factory=dict)
    changed: dict[Hashable, tuple[bool, bool]] = field(default_factory=dict)

    def next(self, number: int) -> TokenTrial:
        """A pass in which a set of tokens is replaced."""
        return replace(self, number=number, changed={})

    @property
    def is_reference(self) -> bool:
        """Whether this pass runs the model as it is."""
        return self.number is None

    def see(self, place: Hashable, value: Tensor, shape: torch.Size, *, is_part: bool = False) -> None:
        """Keep a value, or compare it; ``shape`` is that of the stream, of which it may be a view.

        A part of a branch may also have its axes in the usual order, however the stream is stored.
        """
        if not _is_plain(value):
            return
        with hidden():
            if self.is_reference:
                self.kept[place] = value.detach().clone()
                return
            before = self.kept.get(place)
            replaced = None if before is None or before.shape != value.shape else self._replaced(shape)
            if before is None or replaced is None or not (is_part or value.numel() == replaced.numel()):
                return
            changed = differs(before, value, _ROUNDINGS.get(before.dtype, 2))
            orders = [replaced] if value.numel() == replaced.numel() else []
            orders += self._in_usual_order(value) if is_part else []
            changes = []
            for order in orders:
                here = order.to(value.device).reshape(value.shape)
                changes.append((bool((changed & here).any()), bool((changed & ~here).any())))
            if changes:
                self.changed[place] = min(changes, key=lambda change: change[1])

    def can_see(self, part: Tensor, shape: torch.Size) -> bool:
        """Whether a part of a branch has as many entries as the stream of this shape, or as one of several streams."""
        if part.numel() == shape.numel():
            return True
        if self.stream is None or not self.stream.has_streams or self.stream.axes is None:
            return False
        try:
            words, sizes = self.stream.unfolded(shape, self.batch)
        except SiteError:
            return False
        return part.numel() * sizes[list(words).index("streams")] == shape.numel() and part.dim() == 3

    def with_other_tokens(self, place: Hashable, shape: torch.Size) -> Tensor | None:
        """The value of the reference pass with some tokens replaced; None if it was not kept."""
        with hidden():
            before = self.kept.get(place)
            replaced = None if before is None else self._replaced(shape)
            if before is None or replaced is None or before.numel() != replaced.numel():
                return None
            drawn = np.random.default_rng(self.number).standard_normal(before.shape, dtype=np.float32)
            finite = before[before.isfinite()].float()
            size = float(finite.square().mean().sqrt()) if finite.any() else 1.0
            moved = before + (torch.from_numpy(drawn) * size).to(before.device, before.dtype)
            return torch.where(replaced.to(before.device).reshape(before.shape), moved, before)

    def _in_usual_order(self, value: Tensor) -> list[Tensor]:
        """Which entries belong to a replaced token if the axes are ``batch tokens dim`` or ``tokens batch dim``."""
        if value.dim() != 3:
            return []
        rows_first, tokens_first = (value.shape[axis] == self.batch for axis in (0, 1))
        chosen = []
        if rows_first:
            chosen.append(_tokens(self.batch, value.shape[1], self.number))
        if tokens_first:
            chosen.append(_tokens(self.batch, value.shape[0], self.number).T)
        return [one[..., None].expand(value.shape) for one in chosen]

    def _replaced(self, shape: torch.Size) -> Tensor | None:
        """Which entries of a stream belong to a replaced token; None if there are fewer than two tokens."""
        if self.stream is not None and self.stream.axes is not None:
            joined = replace(self.stream, streams="join")
            try:
                batch, tokens, dim = joined.sizes(shape, self.batch)
            except SiteError:
                return None
            if tokens < 2:
                return None
            return joined.native(_tokens(batch, tokens, self.number)[..., None].expand(-1, -1, dim), shape, self.batch)
        places = shape[:-1]
        count = places.numel()
        rows = self.batch if count % self.batch == 0 else 1
        if count < 2 * rows:
            return None
        chosen = _tokens(rows, count // rows, self.number)
        if len(places) == 2 and places[0] != self.batch and places[1] == self.batch:
            chosen = chosen.T
        return chosen.reshape(*places, 1).expand(shape)


def responses(trials: list[TokenTrial], place: Hashable) -> Response | None:
    """How what was compared at a place responded to replaced tokens; None if it did not, or was not met."""
    seen = [trial.changed.get(place) for trial in trials]
    if any(change is not None and change[1] for change in seen):
        return "mixes"
    return "alone" if seen and all(change is not None and change[0] for change in seen) else None


def silent_in(model: nn.Module) -> dict[str, Tensor]:
    """Other numbers for the parameters that hide what acts on what.

    These are zero, as gains and last layers are where training begins, or hold NaN or infinity.
    """
    silent = {
        name: parameter
        for name, parameter in model.named_parameters()
        if type(parameter) is nn.Parameter and parameter.is_floating_point() and not parameter.is_meta
        and parameter.numel() <= _LARGEST and _is_silent(parameter.detach())
    }  # fmt: skip
    return {name: _drawn(one) for name, one in silent.items()}


def _is_silent(weight: Tensor) -> bool:
    return not bool(weight.any()) or not bool(weight.isfinite().all())


def _drawn(like: Tensor) -> Tensor:
    """Random numbers that keep the scale of what they are multiplied with."""
    scale = max(1, like[0].numel() if like.dim() else 1) ** -0.5
    drawn = np.asarray(np.random.default_rng(0).normal(0.0, scale, tuple(like.shape)))
    return torch.from_numpy(drawn).to(like.device, like.dtype)


@lru_cache(maxsize=64)
def _tokens(rows: int, tokens: int, number: int | None) -> Tensor:
    """The replaced tokens of each sequence in the pass of this number."""
    draw = np.random.default_rng(tokens)
    choices = [0]
    for _ in range(tokens - 2):
        choices.append(int(draw.choice([one for one in range(2, 6) if one != choices[-1]])))
    sets = torch.tensor([_CHOICES[one] for one in (*choices, 1)])
    # A single sequence is tested in one direction only, but for its two ends.
    return torch.stack([(sets >> (row % 2 * PASSES + (number or 0))) & 1 == 1 for row in range(rows)])


def _is_plain(value: Tensor) -> bool:
    """Whether a tensor has memory of its own that can be compared."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(value)
    return type(value) in (Tensor, nn.Parameter) and not is_wrapped and not value.is_meta and value.is_floating_point()
