"""The interface of attention metrics, whether the probabilities are in memory or computed tile by tile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class AttentionSums:
    """Mass and sum of p log p of each row of P, and sums of squares of P and CP, in one unit per matrix."""

    mass: Float[Tensor, "matrices query"]
    p_log_p: Float[Tensor, "matrices query"]
    energy: Float[Tensor, " matrices"]
    centred_energy: Float[Tensor, " matrices"]


class AttentionView(ABC):
    """Attention probabilities P, one matrix per head and sequence, accessed through float64 reductions.

    Reductions have one leading ``matrices`` axis: the batch axes and the heads, flattened.

    Attributes:
        batch_shape: the batch axes and the heads.
        keys: number of keys.
    """

    batch_shape: tuple[int, ...]
    keys: int

    @property
    @abstractmethod
    def valid(self) -> Bool[Tensor, "matrices query"]:
        """Which rows count."""

    @property
    @abstractmethod
    def count(self) -> Float[Tensor, " matrices"]:
        """Number of query rows that count."""

    @property
    @abstractmethod
    def fewest(self) -> int:
        """Lower bound on the number of rows that count in any matrix."""

    @property
    @abstractmethod
    def support_size(self) -> Float[Tensor, "matrices query"]:
        """Number of keys each row may see."""

    @property
    @abstractmethod
    def sees_first(self) -> Bool[Tensor, "matrices query"]:
        """Whether a row may see the first key."""

    @property
    @abstractmethod
    def first_mass(self) -> Float[Tensor, "matrices query"]:
        """Probability that each row gives to the first key."""

    @property
    @abstractmethod
    def sees_itself(self) -> Bool[Tensor, "matrices query"]:
        """Whether a row may see the key at its own position; False if there are not as many keys as queries."""

    @property
    @abstractmethod
    def own_mass(self) -> Float[Tensor, "matrices query"]:
        """Probability that each row gives to the key at its own position; 0 where there is none."""

    @property
    @abstractmethod
    def sums(self) -> AttentionSums:
        """Mass, p log p and squares."""

    @property
    @abstractmethod
    def largest_centred_singular_value(self) -> Float[Tensor, " matrices"]:
        """Largest singular value of CP; NaN for P = 0."""

    @property
    def finite(self) -> Bool[Tensor, " matrices"]:
        """Whether every probability that counts is a finite number."""
        return self.sums.energy.isfinite()

    @property
    def relative_deviation(self) -> Float[Tensor, " matrices"]:
        r""":math:`\|CP\|_F / \|P\|_F`, the quantity that is compared with the float floor."""
        return (self.sums.centred_energy / self.sums.energy).sqrt()

    def is_resolved(self, floor: float) -> Bool[Tensor, " matrices"]:
        """Whether rows differ by more than the rounding of their dtype."""
        return self.relative_deviation > floor
