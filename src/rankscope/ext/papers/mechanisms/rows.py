"""The rows of the table of mechanisms: model families at one common size, as data. No torch in this file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from rankscope.ext.papers._spec import ExperimentSize

Group = Literal["softmax", "positions", "local", "approximate", "recurrent", "hybrid"]
GROUPS: Mapping[Group, str] = {
    "softmax": "softmax attention",
    "positions": "positions inside attention",
    "local": "windows and sparse patterns",
    "approximate": "instead of softmax",
    "recurrent": "linear and recurrent",
    "hybrid": "hybrids",
}
Config = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MechanismSize(ExperimentSize):
    """The size every mechanism is built at.

    Attributes:
        width: of the residual stream.
        depth: number of blocks.
        heads: if there are any.
        tokens: of a sequence; an image has as many patches.
        vocabulary: tokens a text model knows.
        sequences: read in float64; exact arithmetic reads the first.
        seeds: random initialisations.
    """

    width: int = 128
    depth: int = 12
    heads: int = 4
    tokens: int = 64
    vocabulary: int = 512
    sequences: int = 2
    seeds: int = 3

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads

    @property
    def window(self) -> int:
        """Tokens of a sliding window."""
        return self.tokens // 4

    @property
    def side(self) -> int:
        """Patches along one side of a square image."""
        return math.isqrt(self.tokens)

    def every(self, period: int, offset: int) -> list[int]:
        """Numbers of the blocks ``offset``, ``offset + period``, ..."""
        return list(range(offset % period, self.depth, period))


FULL = MechanismSize()
SMALL = MechanismSize(width=32, depth=2, tokens=16, vocabulary=64, sequences=1, seeds=1)
IN_SMALL = ("bert", "gpt2", "sinks", "fourier", "mamba2")


@dataclass(frozen=True)
class Mechanism:
    """One row.

    Attributes:
        name: as it is written on the command line.
        model: the family of transformers it is taken from.
        words: what mixes tokens, in one line.
        group: its place in the table.
        model_type: of the transformers configuration.
        config: keys of that configuration, given the common size.
        model_class: the class to build.
        uncut: why its skips cannot all be cut; empty if they can.
    """

    name: str
    model: str
    words: str
    group: Group
    model_type: str
    config: Callable[[MechanismSize], Config]
    model_class: str = "AutoModel"
    uncut: str = ""


def _special(s: MechanismSize) -> Config:
    return {"vocab_size": s.vocabulary, "bos_token_id": 1, "eos_token_id": 2}


def _padded(s: MechanismSize, width: str = "n_embd", depth: str = "n_layer", heads: str = "n_head") -> Config:
    """The first causal models differ in their names for width, depth and heads."""
    return {**_special(s), "pad_token_id": 0, width: s.width, depth: s.depth, heads: s.heads}


def _encoder(s: MechanismSize) -> Config:
    """Keys that most text models share."""
    names = _padded(s, "hidden_size", "num_hidden_layers", "num_attention_heads")
    return {**names, "intermediate_size": 4 * s.width}


def _decoder(s: MechanismSize) -> Config:
    return {**_encoder(s), "num_key_value_heads": s.heads}


def _with_head_width(s: MechanismSize) -> Config:
    return {**_decoder(s), "head_dim": s.head}


def _windowed(s: MechanismSize) -> Config:
    return {**_with_head_width(s), "sliding_window": s.window, "query_pre_attn_scalar": s.head}


def _vision(s: MechanismSize) -> Config:
    """An image has as many patches as a text has tokens."""
    text = {name: value for name, value in _encoder(s).items() if name not in (*_special(s), "pad_token_id")}
    return {**text, "patch_size": 8, "image_size": 8 * s.side}


def _experts(s: MechanismSize) -> Config:
    return {"num_local_experts": 1, "num_experts_per_tok": 1}


def _minimax(s: MechanismSize) -> Config:
    return {**_with_head_width(s), **_experts(s), "block_size": 16}


def _delta_net(s: MechanismSize) -> Config:
    heads = {f"linear_num_{which}_heads": s.heads for which in ("key", "value")}
    widths = {f"linear_{which}_head_dim": s.head for which in ("key", "value")}
    return {**_with_head_width(s), "mlp_only_layers": list(range(s.depth)), **heads, **widths}


def _state_space(s: MechanismSize) -> Config:
    shape = {"hidden_size": s.width, "num_hidden_layers": s.depth}
    return {**_special(s), "pad_token_id": 0, **shape, "state_size": 16}


def _mamba2(s: MechanismSize) -> Config:
    """The state-space half of a hybrid with Mamba-2 layers: an inner width of twice the stream, in 8 heads."""
    shape = {"mamba_n_heads": 8, "mamba_d_head": s.width // 4, "mamba_d_state": 16, "mamba_chunk_size": 16}
    return {**_decoder(s), **shape}


# fmt: off
_ROWS: tuple[Mechanism, ...] = (
    Mechanism("bert", "BERT", "complete; learned positions at the input", "softmax", "bert", _encoder),
    Mechanism("vit", "ViT", "complete, image patches; learned positions at the input", "softmax", "vit", _vision),
    Mechanism("dinov2", "DINOv2", "complete, image patches; layer scale", "softmax", "dinov2",
              lambda s: {**_vision(s), "mlp_ratio": 4}),
    Mechanism("gpt2", "GPT-2", "causal; learned positions at the input", "softmax", "gpt2", _padded),
    Mechanism("llama", "Llama", "causal, rotary; RMSNorm, gated MLP", "softmax", "llama", _with_head_width),
    Mechanism("mla", "DeepSeek-V3", "causal; keys and values from a latent of a quarter of the width", "softmax",
              "deepseek_v3",
              lambda s: {**_decoder(s), "q_lora_rank": s.width // 2, "kv_lora_rank": s.width // 4,
                         "qk_rope_head_dim": s.head // 2, "qk_nope_head_dim": s.head // 2, "v_head_dim": s.head,
                         "first_k_dense_replace": s.depth}),
    Mechanism("differential", "DiffLlama", "causal, rotary; difference of two softmaxes", "softmax", "diffllama",
              _with_head_width),
    Mechanism("gated", "Qwen3-Next (softmax)", "causal, rotary; output times a sigmoid gate", "softmax", "qwen3_next",
              lambda s: {**_with_head_width(s), "layer_types": ["full_attention"] * s.depth,
                         "mlp_only_layers": list(range(s.depth))}),
    Mechanism("sinks", "gpt-oss", "causal, rotary, half in windows; a learned sink beside the keys", "softmax",
              "gpt_oss", lambda s: {**_with_head_width(s), **_experts(s), "sliding_window": s.window}),
    Mechanism("alibi", "BLOOM", "causal; a slope on distance (ALiBi)", "positions", "bloom",
              lambda s: _padded(s, width="hidden_size")),
    Mechanism("relative-bias", "T5 encoder", "complete; a learned bias per distance, scores unscaled", "positions",
              "t5",
              lambda s: {"vocab_size": s.vocabulary, "d_model": s.width, "d_kv": s.head, "d_ff": 4 * s.width,
                         "num_layers": s.depth, "num_heads": s.heads}, "T5EncoderModel"),
    Mechanism("disentangled", "DeBERTa-v2", "complete; content-position terms in the scores", "positions",
              "deberta-v2",
              lambda s: {**_encoder(s), "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
                         "position_buckets": s.tokens // 2}),
    Mechanism("modernbert", "ModernBERT", "complete every third block, else a window; rotary, gated MLP", "local",
              "modernbert",
              lambda s: {**_encoder(s), "cls_token_id": 3, "sep_token_id": 4, "local_attention": s.window}),
    Mechanism("local-global", "Gemma 2", "causal; every other block in a window; soft cap, sandwich norms", "local",
              "gemma2", _windowed),
    Mechanism("local-global-5-1", "Gemma 3", "causal; five blocks of six in a window; query-key norms", "local",
              "gemma3_text", _windowed),
    Mechanism("longformer", "Longformer", "a window of an eighth of the sequence", "local", "longformer",
              lambda s: {**_encoder(s), "attention_window": max(4, s.tokens // 8), "sep_token_id": 3}),
    Mechanism("big-bird", "BigBird", "window, random and global blocks of 2 tokens", "local", "big_bird",
              lambda s: {**_encoder(s), "attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1,
                         "sep_token_id": 3}),
    Mechanism("shifted-windows", "Swin (one stage)", "windows of 4 x 4 patches, shifted in every other block", "local",
              "swin",
              lambda s: {"image_size": 4 * s.side, "patch_size": 4, "embed_dim": s.width, "depths": [s.depth],
                         "num_heads": [s.heads], "window_size": max(2, s.side // 2)}),
    Mechanism("lsh", "Reformer", "softmax among tokens of one hash bucket; reversible blocks", "local", "reformer",
              lambda s: {"vocab_size": s.vocabulary, "hidden_size": s.width, "num_attention_heads": s.heads,
                         "attention_head_size": s.head, "feed_forward_size": 4 * s.width,
                         "attn_layers": ["lsh"] * s.depth, "axial_pos_embds": False,
                         "max_position_embeddings": s.tokens, "lsh_attn_chunk_length": s.tokens // 8, "num_buckets": 8,
                         "hash_seed": 0, "is_decoder": False},
              uncut="a reversible block has two streams, and surgery follows only the one to which attention is added"),
    Mechanism("pooling", "Funnel", "complete, relative positions; tokens pooled in pairs twice", "approximate",
              "funnel",
              lambda s: {"vocab_size": s.vocabulary, "d_model": s.width, "n_head": s.heads, "d_head": s.head,
                         "d_inner": 4 * s.width,
                         "block_sizes": [s.depth // 3] * 3 if s.depth >= 3 else [1] * s.depth}, "FunnelBaseModel"),
    Mechanism("nystrom", "Nyströmformer", "low-rank softmax through 8 landmarks, and a convolution of the values",
              "approximate", "nystromformer",
              lambda s: {**_encoder(s), "num_landmarks": 8, "segment_means_seq_len": s.tokens}),
    Mechanism("yoso", "YOSO", "expected hash collisions instead of a softmax", "approximate", "yoso",
              lambda s: {**_encoder(s), "use_expectation": True}),
    Mechanism("fourier", "FNet", "a Fourier transform over tokens and features; nothing learned", "approximate", "fnet",
              lambda s: {**_encoder(s), "use_tpu_fourier_optimizations": False}),
    Mechanism("lightning", "MiniMax (linear)", "linear attention with decay, no normaliser", "recurrent", "minimax",
              lambda s: {**_minimax(s), "layer_types": ["linear_attention"] * s.depth}),
    Mechanism("delta-net", "Qwen3-Next (linear)", "gated delta rule and a short convolution", "recurrent", "qwen3_next",
              lambda s: {**_delta_net(s), "layer_types": ["linear_attention"] * s.depth}),
    Mechanism("mamba", "Mamba", "selective state space and a short convolution", "recurrent", "mamba", _state_space),
    Mechanism("mamba2", "Mamba-2", "state space with one decay per head", "recurrent", "mamba2",
              lambda s: {**_state_space(s), "num_heads": 8, "head_dim": s.width // 4, "n_groups": 1,
                         "chunk_size": 16}),
    Mechanism("rwkv", "RWKV-4", "weighted averages of the past, tokens shifted by one", "recurrent", "rwkv",
              lambda s: {**_special(s), "hidden_size": s.width, "num_hidden_layers": s.depth,
                         "attention_hidden_size": s.width, "intermediate_size": 4 * s.width,
                         "context_length": s.tokens}),
    Mechanism("xlstm", "xLSTM", "matrix memory with exponential gates", "recurrent", "xlstm",
              lambda s: {"vocab_size": s.vocabulary, "hidden_size": s.width, "embedding_dim": s.width,
                         "num_hidden_layers": s.depth, "num_heads": s.heads, "chunk_size": 16,
                         "autocast_kernel_dtype": "float32"}),
    Mechanism("lightning-hybrid", "MiniMax", "linear attention and causal softmax in turn", "hybrid", "minimax",
              _minimax),
    Mechanism("delta-hybrid", "Qwen3-Next", "three gated delta blocks, one of gated softmax", "hybrid", "qwen3_next",
              _delta_net),
    Mechanism("jamba", "Jamba", "three Mamba blocks, one of causal softmax", "hybrid", "jamba",
              lambda s: {**_decoder(s), "num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 4,
                         "attn_layer_offset": 2, "use_mamba_kernels": False}),
    Mechanism("zamba2", "Zamba2", "Mamba-2 blocks; one shared softmax block in four", "hybrid", "zamba2",
              lambda s: {**_decoder(s), "use_mamba_kernels": False, "chunk_size": 16, "mamba_d_state": 16,
                         "n_mamba_heads": 8, "num_mem_blocks": 1,
                         "layers_block_type": ["hybrid" if i in s.every(4, 2) else "mamba" for i in range(s.depth)]}),
    Mechanism("bamba", "Bamba", "three Mamba-2 blocks, one of causal softmax", "hybrid", "bamba",
              lambda s: {**_mamba2(s), "attn_layer_indices": s.every(4, 2)}),
    Mechanism("falcon-h1", "Falcon-H1", "Mamba-2 and causal softmax side by side in every block", "hybrid",
              "falcon_h1", lambda s: {**_mamba2(s), "mamba_d_ssm": 2 * s.width}),
    Mechanism("recurrent-gemma", "RecurrentGemma", "two gated linear recurrences, one local softmax", "hybrid",
              "recurrent_gemma",
              lambda s: {**_with_head_width(s), "lru_width": s.width, "attention_window_size": s.window}),
)
# fmt: on
MECHANISMS: Mapping[str, Mechanism] = MappingProxyType({entry.name: entry for entry in _ROWS})
"""Every mechanism by its name, in the order of the table."""
