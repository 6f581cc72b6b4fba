r"""A branch of a block: the tokens it reads, and what it adds to the stream.

The span of the tokens that a branch reads holds every combination of them; what it writes outside that span is new to
the sequence.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.errors import InputError
from rankscope.linalg.precision import float_floor
from rankscope.linalg.spectrum import least_with_six_digits
from rankscope.linalg.tokens import Tokens


class Branch:
    """The tokens ``read`` by a branch and what it has ``added`` to the stream, both ``(*batch, tokens, dim)``.

    Reductions are computed in float64 on first use, and cached.

    Args:
        read: the input of the branch, after its norm.
        added: its output.
        keep: which tokens count, ``(*batch, tokens)``.

    Raises:
        InputError: the two do not have the same shape, or ``keep`` does not fit them.
    """

    def __init__(
        self,
        read: Float[Tensor, "*batch tokens dim"],
        added: Float[Tensor, "*batch tokens dim"],
        keep: Bool[Tensor, "*batch tokens"] | None = None,
    ) -> None:
        if read.shape != added.shape:
            raise InputError(
                f"A branch reads a tensor of shape {tuple(read.shape)} and adds one of shape {tuple(added.shape)}. "
                "Expected the same shape."
            )
        self._read, self._added = Tokens(read, keep), Tokens(added, keep)
        self.batch_shape = self._read.batch_shape
        self.fewest = self._read.fewest

    @property
    def count(self) -> Float[Tensor, " sequences"]:
        """Number of tokens that count."""
        return self._read.count

    @property
    def finite(self) -> Bool[Tensor, " sequences"]:
        """Whether every entry that counts is a finite number."""
        return self._read.finite & self._added.finite

    @property
    def energy_outside(self) -> Float[Tensor, " sequences"]:
        """Share of the energy of what was added that is orthogonal to the span of the tokens read.

        NaN if nothing was added, if nothing was read, or if the tokens read span all channels.
        """
        return self._outside[:, 0]

    @property
    def is_span_uncertain(self) -> Bool[Tensor, " sequences"]:
        """Whether a direction of the span is so small that rounding leaves it fewer than six digits."""
        return self._outside[:, 1] < least_with_six_digits(torch.float64)  # its SVD is that of X, not of a Gram matrix

    @cached_property
    def _outside(self) -> Float[Tensor, "sequences 2"]:
        found = self._read.zeros(2) + math.nan
        for sequence in self.finite.nonzero().flatten().tolist() if self._read.tokens else []:
            found[sequence] = found.new_tensor(self._outside_of_one(slice(sequence, sequence + 1)))
        return found

    def _outside_of_one(self, sequence: slice) -> tuple[float, float]:
        """Share of the energy outside, and the least singular value of the span relative to the largest."""
        X, Y = (tokens.piece(sequence, slice(None))[0] for tokens in (self._read, self._added))
        _, sizes, directions = torch.linalg.svd(X, full_matrices=False)
        # A rounding error in every entry changes each singular value by less than the floor times the largest one.
        span = directions[sizes > float_floor(self._read.dtype) * sizes[0]]
        if len(span) in (0, X.shape[-1]):
            return math.nan, math.nan
        outside: Tensor = Y - Y @ span.T @ span
        return float(outside.square().sum() / Y.square().sum()), float(sizes[len(span) - 1] / sizes[0])
