"""Published shapes at real size; every number is in the paper or the released configuration of the model named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankscope.models.presets.record import InputKind, Preset


def _shape(
    name: str,
    model_type: str,
    summary: str,
    config: Mapping[str, Any],
    model_class: str = "AutoModel",
    input_kind: InputKind = "text",
) -> Preset:
    return Preset(name, model_type, config, model_class, input_kind, summary)


_BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_32 = {
    "vocab_size": 128256,
    "intermediate_size": 8192,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "tie_word_embeddings": True,
    "rope_parameters": _LLAMA_ROPE,
}

REAL: tuple[Preset, ...] = (
    _shape("bert-base", "bert", "BERT base, uncased: 12 blocks of width 768", _BASE),
    _shape("bert-large", "bert", "BERT large, uncased: 24 blocks of width 1024", _BERT_LARGE),
    _shape(
        "roberta-base",
        "roberta",
        "RoBERTa base: 12 blocks of width 768",
        {**_BASE, "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    ),
    _shape(
        "roberta-large",
        "roberta",
        "RoBERTa large: 24 blocks of width 1024",
        {
            **_BERT_LARGE,
            "vocab_size": 50265,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
        },
    ),
    _shape(
        "albert-base",
        "albert",
        "ALBERT base v2: one block of width 768 called 12 times",
        {
            **_BASE,
            "embedding_size": 128,
            "hidden_act": "gelu_new",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    _shape("distilbert-base", "distilbert", "DistilBERT base: 6 blocks of width 768", {}),
    _shape("electra-base", "electra", "ELECTRA base: 12 blocks of width 768", {**_BASE, "embedding_size": 768}),
    _shape(
        "deberta-v3-base",
        "deberta-v2",
        "DeBERTa v3 base: 12 blocks of width 768, disentangled attention",
        {
            **_BASE,
            "relative_attention": True,
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "max_relative_positions": -1,
            "type_vocab_size": 0,
        },
    ),
    _shape("modernbert-base", "modernbert", "ModernBERT base: 22 blocks of width 768, local and global attention", {}),
    _shape(
        "xlnet-base",
        "xlnet",
        "XLNet base, cased: 12 blocks of width 768, two-stream relative attention",
        {"vocab_size": 32000, "d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072},
    ),
    _shape("gpt2", "gpt2", "GPT-2 small: 12 blocks of width 768", {}),
    _shape(
        "gpt2-medium", "gpt2", "GPT-2 medium: 24 blocks of width 1024", {"n_embd": 1024, "n_layer": 24, "n_head": 16}
    ),
    _shape("gpt2-large", "gpt2", "GPT-2 large: 36 blocks of width 1280", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    _shape("gpt2-xl", "gpt2", "GPT-2 XL: 48 blocks of width 1600", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    _shape(
        "gpt-neox",
        "gpt_neox",
        "GPT-NeoX at the Pythia 160M shape: 12 parallel blocks of width 768",
        {**_BASE, "vocab_size": 50304, "bos_token_id": 0, "eos_token_id": 0},
    ),
    _shape("opt-125m", "opt", "OPT 125M: 12 blocks of width 768", {}),
    _shape(
        "bloom-560m",
        "bloom",
        "BLOOM 560M: 24 blocks of width 1024, ALiBi",
        {
            "vocab_size": 250880,
            "hidden_size": 1024,
            "n_layer": 24,
            "n_head": 16,
        },
    ),
    _shape(
        "llama-1b",
        "llama",
        "Llama 3.2 1B: 16 blocks of width 2048, 32 heads over 8 key-value heads",
        {
            **_LLAMA_32,
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "head_dim": 64,
        },
    ),
    _shape(
        "llama-3b",
        "llama",
        "Llama 3.2 3B: 28 blocks of width 3072, 24 heads over 8 key-value heads",
        {
            **_LLAMA_32,
            "hidden_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "head_dim": 128,
        },
    ),
    _shape(
        "smollm2-135m",
        "llama",
        "SmolLM2 135M: 30 blocks of width 576, 9 heads over 3 key-value heads",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    _shape(
        "qwen2.5-0.5b",
        "qwen2",
        "Qwen2.5 0.5B: 24 blocks of width 896, 14 heads over 2 key-value heads",
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
        },
    ),
    _shape(
        "gemma2-2b",
        "gemma2",
        "Gemma 2 2B: 26 sandwich-norm blocks of width 2304",
        {
            "vocab_size": 256000,
            "hidden_size": 2304,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "intermediate_size": 9216,
        },
    ),
    _shape(
        "mamba-130m",
        "mamba",
        "Mamba 130M: 24 state-space blocks of width 768",
        {
            "vocab_size": 50280,
            "hidden_size": 768,
            "num_hidden_layers": 24,
            "state_size": 16,
        },
    ),
    _shape(
        "t5-base",
        "t5",
        "T5 base: 12 encoder and 12 decoder blocks of width 768",
        {
            "vocab_size": 32128,
            "d_model": 768,
            "d_kv": 64,
            "d_ff": 3072,
            "num_layers": 12,
            "num_heads": 12,
            "decoder_start_token_id": 0,
        },
        input_kind="text-to-text",
    ),
    _shape(
        "t5-base-encoder",
        "t5",
        "encoder half of T5 base: 12 blocks of width 768",
        {
            "vocab_size": 32128,
            "d_model": 768,
            "d_kv": 64,
            "d_ff": 3072,
            "num_layers": 12,
            "num_heads": 12,
        },
        model_class="T5EncoderModel",
    ),
    _shape(
        "bart-base",
        "bart",
        "BART base: 6 encoder and 6 decoder blocks of width 768",
        {
            "d_model": 768,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
        },
        input_kind="text-to-text",
    ),
    _shape("vit-base", "vit", "ViT base, 16 x 16 patches at 224: 12 blocks of width 768", _BASE, input_kind="image"),
    _shape(
        "vit-large",
        "vit",
        "ViT large, 16 x 16 patches at 224: 24 blocks of width 1024",
        _BERT_LARGE,
        input_kind="image",
    ),
    _shape("deit-base", "deit", "DeiT base: 12 blocks of width 768, a distillation token", _BASE, input_kind="image"),
    _shape(
        "dinov2-base",
        "dinov2",
        "DINOv2 base, 14 x 14 patches at 518: 12 blocks of width 768",
        {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 518,
            "patch_size": 14,
        },
        input_kind="image",
    ),
)
