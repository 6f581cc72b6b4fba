"""Rows with sparse patterns, approximations of the softmax, and mixers that are no attention at all."""

from __future__ import annotations

from rankscope.papers.mechanisms.declaring import (
    Mechanism,
    Size,
    decoder,
    encoder,
    mamba2_parts,
    with_head_width,
)


def _delta_net(size: Size) -> dict[str, object]:
    return {
        **with_head_width(size),
        "mlp_only_layers": list(range(size.depth)),
        "linear_num_key_heads": size.heads,
        "linear_num_value_heads": size.heads,
        "linear_key_head_dim": size.head,
        "linear_value_head_dim": size.head,
    }


def _minimax(size: Size) -> dict[str, object]:
    return {**with_head_width(size), "num_local_experts": 1, "num_experts_per_tok": 1, "block_size": 16}


def _state_space(size: Size) -> dict[str, object]:
    shape = {"vocab_size": size.vocabulary, "hidden_size": size.width, "num_hidden_layers": size.depth}
    return {**shape, "state_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


SPARSE: tuple[Mechanism, ...] = (
    Mechanism(
        "longformer",
        "Longformer",
        "a window of an eighth of the sequence",
        "local",
        "longformer",
        lambda size: {**encoder(size), "attention_window": max(4, size.tokens // 8), "sep_token_id": 3},
    ),
    Mechanism(
        "big-bird",
        "BigBird",
        "window, random and global blocks of 2 tokens",
        "local",
        "big_bird",
        lambda size: {
            **encoder(size),
            "attention_type": "block_sparse",
            "block_size": 2,
            "num_random_blocks": 1,
            "sep_token_id": 3,
        },
    ),
    Mechanism(
        "shifted-windows",
        "Swin (one stage)",
        "windows of 4 x 4 patches, shifted in every other block",
        "local",
        "swin",
        lambda size: {
            "image_size": 4 * size.side,
            "patch_size": 4,
            "embed_dim": size.width,
            "depths": [size.depth],
            "num_heads": [size.heads],
            "window_size": max(2, size.side // 2),
        },
    ),
    Mechanism(
        "lsh",
        "Reformer",
        "softmax among tokens of one hash bucket; reversible blocks",
        "local",
        "reformer",
        lambda size: {
            "vocab_size": size.vocabulary,
            "hidden_size": size.width,
            "num_attention_heads": size.heads,
            "attention_head_size": size.head,
            "feed_forward_size": 4 * size.width,
            "attn_layers": ["lsh"] * size.depth,
            "axial_pos_embds": False,
            "max_position_embeddings": size.tokens,
            "lsh_attn_chunk_length": size.tokens // 8,
            "num_buckets": 8,
            "hash_seed": 0,
            "is_decoder": False,
        },
        uncut="a reversible block has two streams, and only the one attention is added to is followed",
    ),
    Mechanism(
        "pooling",
        "Funnel",
        "complete, relative positions; tokens pooled in pairs twice",
        "approximate",
        "funnel",
        lambda size: {
            "vocab_size": size.vocabulary,
            "d_model": size.width,
            "n_head": size.heads,
            "d_head": size.head,
            "d_inner": 4 * size.width,
            "block_sizes": [size.depth // 3] * 3 if size.depth >= 3 else [1] * size.depth,
        },
        "FunnelBaseModel",
    ),
    Mechanism(
        "nystrom",
        "Nyströmformer",
        "low-rank softmax through 8 landmarks, and a convolution of the values",
        "approximate",
        "nystromformer",
        lambda size: {**encoder(size), "num_landmarks": 8, "segment_means_seq_len": size.tokens},
    ),
    Mechanism(
        "yoso",
        "YOSO",
        "expected hash collisions instead of a softmax",
        "approximate",
        "yoso",
        lambda size: {**encoder(size), "use_expectation": True},
    ),
    Mechanism(
        "fourier",
        "FNet",
        "a Fourier transform over tokens and features; nothing learned",
        "approximate",
        "fnet",
        lambda size: {**encoder(size), "use_tpu_fourier_optimizations": False},
    ),
)

RECURRENT: tuple[Mechanism, ...] = (
    Mechanism(
        "lightning",
        "MiniMax (linear)",
        "linear attention with decay, no normaliser",
        "recurrent",
        "minimax",
        lambda size: {**_minimax(size), "layer_types": ["linear_attention"] * size.depth},
    ),
    Mechanism(
        "delta-net",
        "Qwen3-Next (linear)",
        "gated delta rule and a short convolution",
        "recurrent",
        "qwen3_next",
        lambda size: {**_delta_net(size), "layer_types": ["linear_attention"] * size.depth},
    ),
    Mechanism("mamba", "Mamba", "selective state space and a short convolution", "recurrent", "mamba", _state_space),
    Mechanism(
        "mamba2",
        "Mamba-2",
        "state space with one decay per head",
        "recurrent",
        "mamba2",
        lambda size: {
            **_state_space(size),
            "num_heads": 8,
            "head_dim": size.width // 4,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    Mechanism(
        "rwkv",
        "RWKV-4",
        "weighted averages of the past, tokens shifted by one",
        "recurrent",
        "rwkv",
        lambda size: {
            "vocab_size": size.vocabulary,
            "hidden_size": size.width,
            "num_hidden_layers": size.depth,
            "attention_hidden_size": size.width,
            "intermediate_size": 4 * size.width,
            "context_length": size.tokens,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Mechanism(
        "xlstm",
        "xLSTM",
        "matrix memory with exponential gates",
        "recurrent",
        "xlstm",
        lambda size: {
            "vocab_size": size.vocabulary,
            "hidden_size": size.width,
            "embedding_dim": size.width,
            "num_hidden_layers": size.depth,
            "num_heads": size.heads,
            "chunk_size": 16,
            "autocast_kernel_dtype": "float32",
        },
    ),
)

HYBRID: tuple[Mechanism, ...] = (
    Mechanism(
        "lightning-hybrid",
        "MiniMax",
        "linear attention and causal softmax in turn",
        "hybrid",
        "minimax",
        _minimax,
    ),
    Mechanism(
        "delta-hybrid",
        "Qwen3-Next",
        "three gated delta blocks, one of gated softmax",
        "hybrid",
        "qwen3_next",
        _delta_net,
    ),
    Mechanism(
        "jamba",
        "Jamba",
        "three Mamba blocks, one of causal softmax",
        "hybrid",
        "jamba",
        lambda size: {
            **decoder(size),
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "use_mamba_kernels": False,
        },
    ),
    Mechanism(
        "zamba2",
        "Zamba2",
        "Mamba-2 blocks; one shared softmax block in four",
        "hybrid",
        "zamba2",
        lambda size: {
            **decoder(size),
            "use_mamba_kernels": False,
            "chunk_size": 16,
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "num_mem_blocks": 1,
            "layers_block_type": ["hybrid" if i in size.every(4, 2) else "mamba" for i in range(size.depth)],
        },
    ),
    Mechanism(
        "bamba",
        "Bamba",
        "three Mamba-2 blocks, one of causal softmax",
        "hybrid",
        "bamba",
        lambda size: {**decoder(size), "attn_layer_indices": size.every(4, 2), **mamba2_parts(size, "mamba_")},
    ),
    Mechanism(
        "falcon-h1",
        "Falcon-H1",
        "Mamba-2 and causal softmax side by side in every block",
        "hybrid",
        "falcon_h1",
        lambda size: {**decoder(size), "mamba_d_ssm": 2 * size.width, **mamba2_parts(size, "mamba_")},
    ),
    Mechanism(
        "recurrent-gemma",
        "RecurrentGemma",
        "two gated linear recurrences, one local softmax",
        "hybrid",
        "recurrent_gemma",
        lambda size: {
            **decoder(size),
            "lru_width": size.width,
            "attention_window_size": size.tokens // 4,
            "head_dim": size.head,
        },
    ),
)
