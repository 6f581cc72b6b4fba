"""Small transformers for the tasks: BERT with or without positions, and GPT-2.

A network without MLPs has MLPs of width 1 that surgery drops (:data:`WITHOUT_MLP`), so that every verb supports it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForTokenClassification,
    GPT2Config,
    GPT2ForTokenClassification,
    PreTrainedModel,
)

from rankscope.ext.papers.training.tasks import TrainingTask
from rankscope.surgery.operation import Operation

WITHOUT_MLP = Operation(mlp="drop")


class BertForPoints(BertForTokenClassification):
    """BERT that embeds points of the plane with a learnt linear map."""

    main_input_name = "points"

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.reading = nn.Linear(2, config.hidden_size)

    def forward(self, points: Tensor, labels: Tensor | None = None) -> Any:
        """Class scores per point, and the loss if labels are given."""
        return super().forward(inputs_embeds=self.reading(points), labels=labels)


def encoder_for(
    task: TrainingTask,
    *,
    layers: int = 6,
    heads: int = 2,
    width: int = 48,
    mlp_width: int = 1,
    std: float = 0.02,
    seed: int = 0,
) -> BertForTokenClassification:
    """A BERT for ``task``, initialised from ``seed``; the caller's random state is not changed.

    Args:
        task: sets classes, ids and tokens; without positions, their embedding is frozen at zero.
        layers: number of blocks.
        heads: per block.
        width: of the residual stream.
        mlp_width: inside the MLPs; 1 if they are dropped.
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


def decoder_for(task: TrainingTask, *, layers: int, heads: int, width: int, std: float, seed: int) -> PreTrainedModel:
    """A GPT-2 that answers every token, initialised from ``seed``; the caller's random state is not changed."""
    config = GPT2Config(
        vocab_size=task.vocabulary,
        n_positions=task.tokens,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        classifier_dropout=0.0,
        num_labels=task.classes,
        initializer_range=std,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2ForTokenClassification(config).train()
