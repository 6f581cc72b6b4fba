"""What the loops in this folder share: a few sentences, a tokenizer of whole words, and two small models."""

from __future__ import annotations

import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

STEPS, TOKENS = 12, 16
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
PARTS = ("the", "a", "small", "old", "model", "token", "layer", "reads", "writes", "keeps", "every", "next", "word")
WORDS = [f"{one}-{other}" for one in PARTS for other in PARTS for _ in range(8)]
random.Random(0).shuffle(WORDS)


def sentences(count: int) -> list[str]:
    """Stretches of twelve words."""
    return [" ".join(WORDS[8 * place : 8 * place + 12]) for place in range(count)]


def tokenizer() -> PreTrainedTokenizerFast:
    """One id for each word."""
    names = ("[PAD]", "[UNK]", "[EOS]", *sorted(set(WORDS)))
    found = Tokenizer(models.WordLevel({word: number for number, word in enumerate(names)}, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]", model_max_length=32
    )


def ids(count: int = 8 * STEPS) -> Tensor:
    """Sequences of token ids."""
    every = torch.tensor(tokenizer().convert_tokens_to_ids(WORDS))
    return torch.stack([every[7 * place : 7 * place + TOKENS] for place in range(count)])


def llama() -> LlamaForCausalLM:
    """A language model without trained weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer()), max_position_embeddings=32, **SHAPE))


def bert() -> BertModel:
    """An encoder without trained weights."""
    torch.manual_seed(0)
    return BertModel(BertConfig(vocab_size=len(tokenizer()), max_position_embeddings=32, **SHAPE))
