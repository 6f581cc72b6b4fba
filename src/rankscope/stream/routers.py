"""Finds mixtures of experts in a block, and reads which experts each token was sent to.

A softmax is not evidence of a router. What counts is the experts: a module named ``experts`` that holds several of
them, as a list or as three-dimensional weights with one slice per expert. The routing is the tensor of expert numbers
that this module receives. If it receives none (a list that its owner loops over), the routing is the one top-k over as
many scores per token as there are experts, inside the module that owns them. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.stream.attention_calls import is_over_keys
from rankscope.stream.frames import tensors_in
from rankscope.stream.operators import SOFTMAXES

TOP_K = frozenset({torch.topk, Tensor.topk})


@dataclass(frozen=True)
class MixtureOfExperts:
    """The experts of one block.

    Attributes:
        owner: qualified name of the module that holds the experts, relative to the block.
        experts: names of the modules that are experts.
        count: number of experts; None if it cannot be told from their weights.
    """

    owner: str
    experts: tuple[str, ...]
    count: int | None


def mixtures_in(block: nn.Module) -> list[MixtureOfExperts]:
    """Every mixture of experts in a block; shared experts, through which all tokens go, are not part of one."""
    routers: dict[str, list[tuple[str, int | None]]] = {}
    for name, module in block.named_modules():
        owner, _, last = name.rpartition(".")
        if name and (last == "experts" or type(module).__name__.endswith("Experts")):
            routers.setdefault(owner, []).append((name, _count(module)))
    mixtures = []
    for owner, parts in routers.items():
        counts = {count for _, count in parts}
        mixtures.append(
            MixtureOfExperts(owner, tuple(name for name, _ in parts), counts.pop() if len(counts) == 1 else None)
        )
    return [mixture for mixture in mixtures if mixture.count is None or mixture.count > 1]


def _count(experts: nn.Module) -> int | None:
    if isinstance(experts, (nn.ModuleList, nn.ModuleDict)):
        return len(experts)
    stacked = {parameter.shape[0] for parameter in experts.parameters() if parameter.dim() == 3}
    return stacked.pop() if len(stacked) == 1 else None


@dataclass
class RouterWatch:
    """Watches the mixture of one block while it runs.

    Attributes:
        mixture: what is watched.
        rows: number of tokens of the batch.
        given: the expert numbers that the experts received.
        refused: why the routing could not be read; empty if it could.
    """

    mixture: MixtureOfExperts
    rows: int
    given: Tensor | None = None
    refused: str = ""
    _picked: list[Tensor] = field(default_factory=list)
    _softmaxes: list[Tensor] = field(default_factory=list)
    _probs_of: dict[int, Tensor] = field(default_factory=dict)

    def see_call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note a softmax or a top-k over the experts, for every token."""
        scores = args[0] if args else kwargs.get("input")
        if not isinstance(scores, Tensor) or not self._is_per_token(scores, self.mixture.count):
            return
        if func in SOFTMAXES and is_over_keys((scores, *args[1:]), kwargs):
            self._softmaxes.append(out)
        elif func in TOP_K:
            self._picked.append(out[1])
            # Only a softmax that is itself ranked is the router's; another one of the same size is not.
            if any(scores is probs for probs in self._softmaxes):
                self._probs_of[id(out[1])] = scores

    def see_experts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note the expert numbers that the experts receive."""
        numbers = [
            tensor
            for tensor in tensors_in((args, kwargs))
            if tensor.dtype in (torch.int64, torch.int32) and self._is_per_token(tensor, None)
        ]
        # A tensor as wide as there are experts could be a one-hot mask.
        if len(numbers) == 1 and self.mixture.count is not None and numbers[0].shape[-1] < self.mixture.count:
            self.given = numbers[0]

    def routing(self) -> tuple[Tensor, Tensor] | None:
        """Probabilities ``rows experts`` (zero if the router has none), expert numbers ``rows k``; None if refused."""
        count, chosen = self.mixture.count, self.given
        if count is None:
            self.refused = "the number of experts cannot be told from their weights"
            return None
        if chosen is None:
            if len(self._picked) != 1:
                times = f"{len(self._picked)} top-k calls" if self._picked else "no top-k"
                self.refused = f"{times} over {count} scores per token, and the experts received no expert numbers"
                return None
            chosen = self._picked[0]
        probs = self._probs_of.get(id(chosen))
        chosen = chosen.detach().reshape(self.rows, -1)
        if bool((chosen < 0).any()) or bool((chosen >= count).any()):
            self.refused = f"an expert number outside 0 to {count - 1}: tokens are dropped, or experts are elsewhere"
            return None
        if probs is None:
            return chosen.new_zeros(self.rows, count, dtype=torch.float32), chosen
        return probs.detach().reshape(self.rows, count), chosen

    def _is_per_token(self, tensor: Tensor, width: int | None) -> bool:
        if tensor.dim() < 2 or (width is not None and tensor.shape[-1] != width):
            return False
        return tensor.numel() == self.rows * tensor.shape[-1]
