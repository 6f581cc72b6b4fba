"""Small encoders from transformers for the tasks: BERT, with its LayerNorms and skips, with or without positions.

The MLPs are there, as small as can be, and are taken out by ``operate`` (:data:`WITHOUT_MLP`), so that the same model
can be handed to every verb.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForTokenClassification

from rankscope.papers.training.tasks import Task
from rankscope.surgery.operation import Operation

WITHOUT_MLP = Operation(mlp="drop")


class BertForPoints(BertForTokenClassification):
    """BERT that reads points of the plane through a learnt linear map, where words have their embedding."""

    main_input_name = "points"

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.reading = nn.Linear(2, config.hidden_size)

    def forward(self, points: Tensor, labels: Tensor | None = None) -> Any:
        """Class scores per point, and the loss where labels are given."""
        return super().forward(inputs_embeds=self.reading(points), labels=labels)


def encoder_for(
    task: Task,
    *,
    layers: int = 6,
    heads: int = 2,
    width: int = 48,
    mlp_width: int = 1,
    std: float = 0.02,
    seed: int = 0,
) -> BertForTokenClassification:
    """A BERT for ``task``, drawn from ``seed``; the random state of the caller is left alone.

    Args:
        task: tells classes, ids, tokens, and whether there are positions; without, their table is zero and stays so.
        layers: blocks.
        heads: of a block.
        width: of the stream.
        mlp_width: inside of the MLPs; 1 where they are to be dropped.
        std: standard deviation of a weight at initialisation.
        seed: of the weights.
    """
    config = BertConfig(
        vocab_size=max(task.vocabulary, 2),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=mlp_width,
        max_position_embeddings=task.tokens,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        type_vocab_size=1,
        pad_token_id=None,
        num_labels=task.classes,
        initializer_range=std,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (BertForTokenClassification if task.vocabulary else BertForPoints)(config)
    if not task.positions:
        table = model.bert.embeddings.position_embeddings.weight
        table.requires_grad_(False).zero_()
    return model.train()
