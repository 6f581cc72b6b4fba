"""One block of a large model with random weights, and the metrics of what it returns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Spectra, Tokens
from rankscope.metrics import METRICS, evaluate, is_left_out


def block(name: str, dtype: torch.dtype, tokens: int) -> tuple[Callable[[Tensor], object], int]:
    """One block with random weights, and its width."""
    import transformers

    made: nn.Module
    if name == "llama-7b":
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        config = transformers.LlamaConfig(attn_implementation="sdpa")
        made = LlamaDecoderLayer(config, 0).to(dtype).eval()
        places = LlamaRotaryEmbedding(config)(torch.empty(1, dtype=dtype), torch.arange(tokens)[None])
        return lambda x: made(x, position_embeddings=places), config.hidden_size
    if name == "bert-base":
        from transformers.models.bert.modeling_bert import BertLayer

        made = BertLayer(transformers.BertConfig(attn_implementation="sdpa"))
        made = made.to(dtype).eval()
        return made, 768
    from transformers.models.vit.modeling_vit import ViTLayer

    made = ViTLayer(
        transformers.ViTConfig(
            hidden_size=1024, intermediate_size=4096, num_attention_heads=16, attn_implementation="sdpa"
        )
    )
    made = made.to(dtype).eval()
    return made, 1024


def battery(names: tuple[str, ...], x: Tensor, spectra: Spectra | None) -> None:
    """As a reader evaluates it."""
    view = Tokens(x, spectra=spectra)
    evaluate([METRICS[name] for name in names if not is_left_out(METRICS[name], view)], view, float_floor(x.dtype))


def sizes(shape: str) -> tuple[str, int, int]:
    """The block, sequences and tokens that a shape names."""
    name, size = shape.split(":")
    sequences, tokens = size.split("x")
    return name, int(sequences), int(tokens)
