"""Rows whose tokens are mixed by a softmax over keys: complete and causal, with and without positions in the scores."""

from __future__ import annotations

from rankscope.papers.mechanisms.declaring import (
    Mechanism,
    Size,
    decoder,
    encoder,
    old_decoder,
    vision,
    with_head_width,
)

SPECIALS = {"cls_token_id": 3, "sep_token_id": 4}


def _window(size: Size) -> int:
    return size.tokens // 4


SOFTMAX: tuple[Mechanism, ...] = (
    Mechanism("bert", "BERT", "complete; learned positions at the input", "softmax", "bert", encoder),
    Mechanism("vit", "ViT", "complete, image patches; learned positions at the input", "softmax", "vit", vision),
    Mechanism(
        "dinov2",
        "DINOv2",
        "complete, image patches; layer scale",
        "softmax",
        "dinov2",
        lambda size: {**vision(size), "mlp_ratio": 4},
    ),
    Mechanism("gpt2", "GPT-2", "causal; learned positions at the input", "softmax", "gpt2", old_decoder),
    Mechanism("llama", "Llama", "causal, rotary; RMSNorm, gated MLP", "softmax", "llama", with_head_width),
    Mechanism(
        "mla",
        "DeepSeek-V3",
        "causal; keys and values from a latent of a quarter of the width",
        "softmax",
        "deepseek_v3",
        lambda size: {
            **decoder(size),
            "q_lora_rank": size.width // 2,
            "kv_lora_rank": size.width // 4,
            "qk_rope_head_dim": size.head // 2,
            "qk_nope_head_dim": size.head // 2,
            "v_head_dim": size.head,
            "first_k_dense_replace": size.depth,
        },
    ),
    Mechanism(
        "differential",
        "DiffLlama",
        "causal, rotary; difference of two softmaxes",
        "softmax",
        "diffllama",
        with_head_width,
    ),
    Mechanism(
        "gated",
        "Qwen3-Next (softmax)",
        "causal, rotary; output times a sigmoid gate",
        "softmax",
        "qwen3_next",
        lambda size: {
            **with_head_width(size),
            "layer_types": ["full_attention"] * size.depth,
            "mlp_only_layers": list(range(size.depth)),
        },
    ),
    Mechanism(
        "sinks",
        "gpt-oss",
        "causal, rotary, half in windows; a learned sink beside the keys",
        "softmax",
        "gpt_oss",
        lambda size: {
            **with_head_width(size),
            "num_local_experts": 1,
            "num_experts_per_tok": 1,
            "sliding_window": _window(size),
        },
    ),
    Mechanism(
        "alibi",
        "BLOOM",
        "causal; a slope on distance (ALiBi)",
        "positions",
        "bloom",
        lambda size: old_decoder(size, width="hidden_size"),
    ),
    Mechanism(
        "relative-bias",
        "T5 encoder",
        "complete; a learned bias per distance, scores unscaled",
        "positions",
        "t5",
        lambda size: {
            "vocab_size": size.vocabulary,
            "d_model": size.width,
            "d_kv": size.head,
            "d_ff": 4 * size.width,
            "num_layers": size.depth,
            "num_heads": size.heads,
        },
        "T5EncoderModel",
    ),
    Mechanism(
        "disentangled",
        "DeBERTa-v2",
        "complete; content-position terms in the scores",
        "positions",
        "deberta-v2",
        lambda size: {
            **encoder(size),
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": size.tokens // 2,
        },
    ),
    Mechanism(
        "modernbert",
        "ModernBERT",
        "complete every third block, else a window; rotary, gated MLP",
        "local",
        "modernbert",
        lambda size: {**encoder(size), **SPECIALS, "local_attention": _window(size)},
    ),
    Mechanism(
        "local-global",
        "Gemma 2",
        "causal; every other block in a window; soft cap, sandwich norms",
        "local",
        "gemma2",
        lambda size: {
            **with_head_width(size),
            "sliding_window": _window(size),
            "query_pre_attn_scalar": size.head,
        },
    ),
    Mechanism(
        "local-global-5-1",
        "Gemma 3",
        "causal; five blocks of six in a window; query-key norms",
        "local",
        "gemma3_text",
        lambda size: {
            **with_head_width(size),
            "sliding_window": _window(size),
            "query_pre_attn_scalar": size.head,
        },
    ),
)
