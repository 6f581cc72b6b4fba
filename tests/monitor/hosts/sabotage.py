"""How a healthy model is made to collapse in the middle of a training."""

from __future__ import annotations

from typing import Any

import torch


def make_tokens_equal(model: Any) -> None:
    """Every token gets the embedding of the first, at every position, and a large common vector is added.

    Without that vector the next step of the optimizer sets tokens apart again, to a mild collapse that has to last.
    """
    embeddings = model.bert.embeddings
    with torch.no_grad():
        embeddings.word_embeddings.weight.copy_(embeddings.word_embeddings.weight[:1].clone())
        embeddings.position_embeddings.weight.zero_()
        embeddings.LayerNorm.bias[::2] += 1000.0
