"""One attention layer applied again and again to two points of the plane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from transformers import BertConfig, BertPreTrainedModel
from transformers.modeling_outputs import ModelOutput
from transformers.models.bert.modeling_bert import BertLayer

from rankscope.surgery.operation import Operation

VARIANTS: Mapping[str, Operation] = MappingProxyType(
    {
        "attention": Operation(attention_skip=0.0, mlp_skip=0.0, mlp="drop", norm="identity"),
        "attention + skip": Operation(mlp="drop", norm="identity"),
        "attention + MLP": Operation(attention_skip=0.0, mlp_skip=0.0, norm="identity"),
        "attention + skip + MLP": Operation(norm="identity"),
    }
)
"""What is left of the block; norms are out in all four, and "without skip" is without either skip."""


@dataclass
class Turned(ModelOutput):
    """Where the points are after the last step, and the loss where a target was given."""

    points: Tensor | None = None
    loss: Tensor | None = None


class RecurrentBlock(BertPreTrainedModel):
    """Points to width, one BERT block, width to points; the same again for every further step.

    The block is one module called once per step, so that verbs see each step as a block of its own.
    """

    main_input_name = "points"

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.reading = nn.Linear(2, config.hidden_size)
        self.layer = nn.ModuleList([BertLayer(config)])
        self.writing = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, points: Tensor, labels: Tensor | None = None, steps: int = 1) -> Turned:
        """``steps`` steps from ``points`` (batch, 2, 2)."""
        for _ in range(steps):
            points = self.writing(self.layer[0](self.reading(points)))
        return Turned(points=points, loss=None if labels is None else mse_loss(points, labels))


def recurrent_block(width: int, *, heads: int = 2, seed: int = 0) -> RecurrentBlock:
    """A block of this width in float64, its MLP four times as wide, drawn from ``seed``."""
    config: Any = BertConfig(
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=(3 * width) ** -0.5,
        vocab_size=2,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: RecurrentBlock = RecurrentBlock(config).double().train()
    return model
