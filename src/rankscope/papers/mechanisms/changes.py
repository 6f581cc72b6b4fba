"""Checks: one component of a mechanism is changed, to see whether it is what explains the row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

NO_SINK = -math.inf
"""A score to which a softmax gives nothing, exactly: exact arithmetic sees a weight of e^-10000."""
EMBEDDINGS_UP = 50.0
"""Brings embeddings of standard deviation 0.02 to 1, the size that a norm gives to what branches read."""


def _nothing(model: nn.Module) -> None:
    """Leaves the weights alone."""


@dataclass(frozen=True)
class Change:
    """One component changed in one mechanism.

    Attributes:
        mechanism: the row it explains.
        name: of the change.
        words: what is changed.
        apply: changes the weights in place.
        config: keys of the configuration that are changed.
    """

    mechanism: str
    name: str
    words: str
    apply: Callable[[nn.Module], None] = _nothing
    config: Mapping[str, Any] = field(default_factory=dict)


def _fill(ending: str, value: float) -> Callable[[nn.Module], None]:
    @torch.no_grad()
    def apply(model: nn.Module) -> None:
        found = [parameter for name, parameter in model.named_parameters() if name.endswith(ending)]
        assert found, f"no parameter ends with {ending}"
        for parameter in found:
            parameter.fill_(value)

    return apply


@torch.no_grad()
def _raise_embeddings(model: nn.Module) -> None:
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    embeddings.weight.mul_(EMBEDDINGS_UP)


CHANGES: tuple[Change, ...] = (
    Change("sinks", "no sinks", "the learned sink scores set to minus infinity", _fill(".sinks", NO_SINK)),
    Change("nystrom", "no convolution", "the weights of the convolution set to 0", _fill("self.conv.weight", 0.0)),
    Change("llama", "embeddings x 50", "token embeddings of standard deviation 1 instead of 0.02", _raise_embeddings),
    Change("modernbert", "no epsilon", "the epsilon of its norms 1e-60 instead of 1e-5", config={"norm_eps": 1e-60}),
    Change("relative-bias", "no bias", "the bias per distance set to 0", _fill("relative_attention_bias.weight", 0.0)),
)
