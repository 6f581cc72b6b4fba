"""Which experts the tokens of a sequence go to, and the float64 reductions that router metrics are computed from."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankscope.errors import InputError
from rankscope.linalg.joining import Joinable, Made
from rankscope.linalg.precision import float64_home


class Routing(Joinable):
    """Router probabilities and the experts each token was sent to.

    Args:
        probs: ``(*batch, tokens, experts)``, from the softmax over all experts; zero if the router has none (sigmoid
            scores, or a softmax over the chosen experts only).
        chosen: numbers of the experts, ``(*batch, tokens, k)``.
        keep: which tokens count, ``(*batch, tokens)``.

    Raises:
        InputError: the shapes do not fit.
    """

    def __init__(
        self,
        probs: Float[Tensor, "*batch tokens experts"],
        chosen: Int[Tensor, "*batch tokens k"],
        keep: Bool[Tensor, "*batch tokens"] | None = None,
    ) -> None:
        if not probs.is_floating_point() or probs.ndim < 2 or probs.shape[:-1] != chosen.shape[:-1]:
            raise InputError(
                f"A router was given as probabilities of shape {tuple(probs.shape)} and expert numbers of shape "
                f"{tuple(chosen.shape)}. Expected (*batch, tokens, experts) and (*batch, tokens, k)."
            )
        self.made = Made(Routing, (probs, chosen, keep))
        self.batch_shape = tuple(probs.shape[:-2])
        self.fewest = probs.shape[-2] if keep is None else 0
        self.experts = probs.shape[-1]
        home, sequences, tokens = float64_home(probs), math.prod(self.batch_shape), probs.shape[-2]
        every = torch.ones(sequences, tokens, dtype=torch.bool, device=home)
        self.valid = every if keep is None else keep.detach().to(home).reshape(sequences, tokens)
        self._probs = probs.detach().to(home).reshape(sequences, tokens, self.experts)
        self._chosen = chosen.detach().to(home).reshape(sequences, tokens, chosen.shape[-1])

    @cached_property
    def count(self) -> Float[Tensor, " sequences"]:
        """Number of tokens that count."""
        return self.valid.sum(-1).double()

    @cached_property
    def finite(self) -> Bool[Tensor, " sequences"]:
        """Whether every probability that counts is a finite number."""
        return (self._probs.isfinite().all(-1) | ~self.valid).all(-1)

    @cached_property
    def load(self) -> Float[Tensor, "sequences experts"]:
        """Share of the choices that went to each expert; NaN without tokens, or if a probability is not finite."""
        sent = torch.zeros(*self.valid.shape[:1], self.experts, dtype=torch.float64, device=self.valid.device)
        ones = self.valid.unsqueeze(-1).expand(self._chosen.shape).double()
        sent.scatter_add_(1, self._chosen.flatten(1), ones.flatten(1))
        share: Tensor = sent / sent.sum(-1, keepdim=True)
        return share.masked_fill(~self.finite.unsqueeze(-1), math.nan)

    @cached_property
    def entropies(self) -> Float[Tensor, "sequences tokens"]:
        """Entropy of each token's probabilities; NaN for a token without any."""
        probs = self._probs.double()
        p = probs / probs.sum(-1, keepdim=True)
        entropy: Tensor = torch.special.entr(p).sum(-1)
        return entropy
